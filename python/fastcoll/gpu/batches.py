# SPDX-License-Identifier: Apache-2.0
"""Which sends and receives of a batch share a kernel on a GPU.

Decides the kernels and their order, which both ends of every transfer must see alike. Pure: knows
no device.
"""

from collections import Counter
from collections.abc import Sequence

from fastcoll.errors import UnsupportedError


def pair_channels(num_channels: int, most: int) -> int:
    """Return how many thread blocks one transfer may have; a send and a receive must fit.

    Raises:
        UnsupportedError: They do not.
    """
    if num_channels < 2:
        raise UnsupportedError(
            "sends and receives need 2 resident thread blocks of each rank, but this group has "
            f"{num_channels}: use fewer ranks on a GPU, or set FASTCOLL_GPU_CHANNELS"
        )
    return min(most, num_channels // 2)


def kernels(
    pairs: Sequence[tuple[bool, int]], rank: int, world_size: int, num_channels: int, most: int
) -> list[list[int]]:
    """Return the transfers of each kernel, in the order in which the kernels run.

    A kernel has each peer and direction at most once, and no more blocks than may be resident. The
    order is first by the number of a transfer within its pair, which is equal on both sides. Next
    it is by the distance from sender to receiver, a few distances in each kernel. Every rank has
    one send and one receive of a distance. So all ranks come to the kernels of a distance together,
    and none waits for another one's later kernel.

    Args:
        pairs: Whether a transfer sends, and its peer.
        most: The most blocks that one transfer has use for.
    """
    distances = max(1, num_channels // (2 * pair_channels(num_channels, most)))
    seen: Counter[tuple[bool, int]] = Counter()
    grouped: dict[tuple[int, int], list[int]] = {}
    for index, pair in enumerate(pairs):
        sends, peer = pair
        distance = (peer - rank if sends else rank - peer) % world_size
        grouped.setdefault((seen[pair], distance // distances), []).append(index)
        seen[pair] += 1
    return [grouped[key] for key in sorted(grouped)]
