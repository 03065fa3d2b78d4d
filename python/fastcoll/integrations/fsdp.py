# SPDX-License-Identifier: Apache-2.0
"""Communication objects for FSDP2: `fully_shard` over fastcoll on groups of any backend.

Decides which calls FSDP's two primitives become. FSDP takes objects by their methods, not by their
class. So nothing here imports FSDP, which takes longer than all of fastcoll.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fastcoll.api.moves import all_gather_into_tensor
from fastcoll.api.reductions import reduce_scatter_tensor
from fastcoll.calls.work import Work
from fastcoll.integrations.torch_work import TorchWork
from fastcoll.types import OpLike


class _Comm:
    """The common base of both objects: allocates buffers, and returns works of torch's kind."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Make a buffer for one call, from the memory that all tensors come from."""
        return torch.empty(*size, dtype=dtype, device=device)

    @staticmethod
    def _for_torch(work: Work | None) -> dist.Work | None:
        return None if work is None else TorchWork([work])  # FSDP waits for no other class


class AllGather(_Comm):
    """For `module.set_custom_all_gather(AllGather())`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """See `fastcoll.all_gather_into_tensor`; gathers the shards of a layer's parameters."""
        return self._for_torch(all_gather_into_tensor(output_tensor, input_tensor, group, async_op))


class ReduceScatter(_Comm):
    """For `module.set_custom_reduce_scatter(ReduceScatter())`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: OpLike,
        async_op: bool = False,
    ) -> dist.Work | None:
        """See `fastcoll.reduce_scatter_tensor`; averages a layer's gradients into shards.

        `op` is PREMUL_SUM for a model with a gradient divide factor.
        """
        return self._for_torch(
            reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        )


def use_fastcoll(model: nn.Module) -> None:
    """Give all FSDP2 modules of a model both objects; call it after the last `fully_shard`."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(AllGather())  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(ReduceScatter())  # type: ignore[arg-type]
