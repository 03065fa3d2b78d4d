# SPDX-License-Identifier: Apache-2.0
"""The communication hook for DistributedDataParallel.

Decides how a bucket of gradients is averaged. Must not know how DDP fills its buckets.
"""

import torch
from torch.distributed import GradBucket

from fastcoll.api.groups import GroupLike
from fastcoll.api.reductions import all_reduce
from fastcoll.types import ReduceOp


def ddp_hook(state: GroupLike, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average DDP's gradients with fastcoll, for any backend of the process group.

    `model.register_comm_hook(group, fastcoll.ddp_hook)` is all that a program changes. The buckets
    are reduced in the background, in the order in which backward fills them, while it goes on.

    The gradients are summed in the order of the ranks and then divided. DDP itself divides first.
    The two have the same bits where the number of ranks is a power of two and no quotient loses
    digits by its smallness. Otherwise they differ by a rounding.

    Args:
        state: The first argument of `register_comm_hook`: a process group or a Communicator of the
            ranks that train together, as DDP's `process_group`. None is the default group. A group
            that is new to fastcoll is made at the first bucket.
        bucket: The gradients; averaged where they are.

    Returns:
        A future of the averaged bucket. If the call raises, backward raises RuntimeError with the
        same text, as DDP makes one of it. The group's next call raises the error itself.
    """
    work = all_reduce(bucket.buffer(), ReduceOp.AVG, state, True)
    assert work is not None, "this rank trains, so it is in the group"
    return work.get_future().then(lambda done: done.value()[0])
