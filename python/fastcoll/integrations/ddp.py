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
    """Average DDP's gradients with fastcoll, whatever backend the process group has.

    `model.register_comm_hook(group, fastcoll.ddp_hook)` is all that a program changes. The buckets
    are reduced in the background, in the order in which backward fills them, while it goes on.

    They are summed in the order of the ranks and then divided. DDP itself divides first: the two
    have the same bits where the number of ranks is a power of two (and no gradient is as small
    that its quotient loses digits), and differ by a rounding otherwise.

    Args:
        state: What `register_comm_hook` was given: a process group with the ranks that train
            together, the same as DDP's `process_group`, or a Communicator; None is the default
            group. A group that is new to fastcoll is made at the first bucket.
        bucket: The gradients; averaged where they are.

    Returns:
        A future of the averaged bucket. What the call raises, backward raises with its text, as
        the RuntimeError that DDP makes of it; the group's next call raises it as it was.
    """
    work = all_reduce(bucket.buffer(), ReduceOp.AVG, state, True)
    assert work is not None, "this rank trains, so it is in the group"
    return work.get_future().then(lambda done: done.value()[0])
