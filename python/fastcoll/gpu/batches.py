# SPDX-License-Identifier: Apache-2.0
"""How many thread blocks a send or a receive has on a GPU.

csrc/group/gpu_batches.h decides which of a batch share a kernel.
"""

from fastcoll.errors import UnsupportedError


def pair_channels(num_channels: int, most: int) -> int:
    """Return how many thread blocks one transfer may have; a send and a receive must fit.

    Args:
        num_channels: Thread blocks of the group.
        most: The most that one transfer has use for.

    Raises:
        UnsupportedError: They do not.
    """
    if num_channels < 2:
        raise UnsupportedError(
            "sends and receives need 2 resident thread blocks of each rank, but this group has "
            f"{num_channels}: use fewer ranks on a GPU, or set FASTCOLL_GPU_CHANNELS"
        )
    return min(most, num_channels // 2)
