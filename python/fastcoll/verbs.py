# SPDX-License-Identifier: Apache-2.0
"""The verbs as methods: torch.distributed's names and argument order, without `group`.

Decides nothing: every method is the C function of the same name, for this group.
"""

from fastcoll import _C
from fastcoll.memory.array import Array
from fastcoll.types import ReduceOp
from fastcoll.work import Work


class VerbMethods(_C.Group):
    """A group with the verbs as methods."""

    def all_reduce(
        self,
        tensor: Array,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        *,
        out: Array | None = None,
        algorithm: str = "auto",
        numerics: str | None = None,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.all_reduce`."""
        return _C.all_reduce(
            tensor,
            op,
            self,
            async_op,
            out=out,
            algorithm=algorithm,
            numerics=numerics,
            timeout_s=timeout_s,
        )

    def reduce_scatter_tensor(
        self,
        output: Array,
        input: Array,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        *,
        algorithm: str = "auto",
        numerics: str | None = None,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.reduce_scatter_tensor`."""
        return _C.reduce_scatter_tensor(
            output,
            input,
            op,
            self,
            async_op,
            algorithm=algorithm,
            numerics=numerics,
            timeout_s=timeout_s,
        )

    def all_gather_into_tensor(
        self,
        output_tensor: Array,
        input_tensor: Array,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.all_gather_into_tensor`."""
        return _C.all_gather_into_tensor(
            output_tensor, input_tensor, self, async_op, timeout_s=timeout_s
        )

    def broadcast(
        self, tensor: Array, src: int, async_op: bool = False, *, timeout_s: float | None = None
    ) -> Work | None:
        """See `fastcoll.broadcast`; `src` is a rank of this group."""
        return _C.broadcast(tensor, src, self, async_op, timeout_s=timeout_s)

    def barrier(self, async_op: bool = False, *, timeout_s: float | None = None) -> Work | None:
        """See `fastcoll.barrier`."""
        return _C.barrier(self, async_op, timeout_s=timeout_s)
