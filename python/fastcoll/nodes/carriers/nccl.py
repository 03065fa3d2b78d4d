# SPDX-License-Identifier: Apache-2.0
"""NCCL as a carrier between the GPUs of a lane.

Decides nothing but how it is ended. A transfer runs in NCCL's own stream, behind the work that the
current stream has when it starts. `wait` of its handle makes the then current stream wait for its
end. Must not know the bytes.
"""

import contextlib

from torch.distributed import Store

from fastcoll.gpu import nccl as device_nccl
from fastcoll.nodes.carriers.torch import TorchCarrier
from fastcoll.types import DType, Op, nccl_adds

_SUMS = frozenset(dtype for dtype in DType if nccl_adds(dtype, Op.SUM, any_order=True))


class NcclCarrier(TorchCarrier):
    """A process group of NCCL's, of this lane alone."""

    def abandon(self) -> None:
        """See `Carrier`; its kernels end."""
        with contextlib.suppress(RuntimeError):  # the device itself may be broken
            self._group.abort()

    def close(self) -> None:
        """See `Carrier`; NCCL's kernels of captured graphs end, too."""
        self.abandon()


def nccl(store: Store, node: int, num_nodes: int) -> NcclCarrier:
    """Make a lane of NCCL. Collective over it at its first call."""
    return NcclCarrier(device_nccl.make(store, node, num_nodes), _SUMS)
