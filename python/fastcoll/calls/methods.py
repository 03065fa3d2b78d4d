# SPDX-License-Identifier: Apache-2.0
"""The verbs as methods: torch.distributed's names and argument order, without `group`.

Decides nothing: every method is the C function of the same name, for this group.
"""

from collections.abc import Sequence

import torch

from fastcoll.calls.arrays import Array
from fastcoll.calls.work import Work
from fastcoll.native import _C
from fastcoll.types import ReduceOp


class VerbMethods:
    """A group with the verbs as methods."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        raise NotImplementedError

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

    reduce_scatter_single = reduce_scatter_tensor

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

    all_gather_single = all_gather_into_tensor

    def broadcast(
        self, tensor: Array, src: int, async_op: bool = False, *, timeout_s: float | None = None
    ) -> Work | None:
        """See `fastcoll.broadcast`; `src` is a rank of this group."""
        return _C.broadcast(tensor, src, self, async_op, timeout_s=timeout_s)

    def barrier(self, async_op: bool = False, *, timeout_s: float | None = None) -> Work | None:
        """See `fastcoll.barrier`."""
        return _C.barrier(self, async_op, timeout_s=timeout_s)

    def reduce(
        self,
        tensor: Array,
        dst: int,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        *,
        out: Array | None = None,
        algorithm: str = "auto",
        numerics: str | None = None,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.reduce`; `dst` is a rank of this group."""
        return _C.reduce(
            tensor,
            dst,
            op,
            self,
            async_op,
            out=out,
            algorithm=algorithm,
            numerics=numerics,
            timeout_s=timeout_s,
        )

    def all_gather(
        self,
        tensor_list: Sequence[Array],
        tensor: Array,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.all_gather`."""
        return _C.all_gather(tensor_list, tensor, self, async_op, timeout_s=timeout_s)

    def reduce_scatter(
        self,
        output: Array,
        input_list: Sequence[Array],
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        *,
        algorithm: str = "auto",
        numerics: str | None = None,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.reduce_scatter`."""
        return _C.reduce_scatter(
            output,
            input_list,
            op,
            self,
            async_op,
            algorithm=algorithm,
            numerics=numerics,
            timeout_s=timeout_s,
        )

    def gather(
        self,
        tensor: Array,
        gather_list: Sequence[Array] | None = None,
        dst: int = 0,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.gather`; `dst` is a rank of this group."""
        return _C.gather(tensor, gather_list, dst, self, async_op, timeout_s=timeout_s)

    def gather_single(
        self,
        tensor: Array,
        gather_tensor: Array | None = None,
        dst: int = 0,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.gather_single`; `dst` is a rank of this group."""
        return _C.gather_single(tensor, gather_tensor, dst, self, async_op, timeout_s=timeout_s)

    gather_into_tensor = gather_single

    def scatter(
        self,
        tensor: Array,
        scatter_list: Sequence[Array] | None = None,
        src: int = 0,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.scatter`; `src` is a rank of this group."""
        return _C.scatter(tensor, scatter_list, src, self, async_op, timeout_s=timeout_s)

    def all_to_all_single(
        self,
        output: Array | None,
        input: Array,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | tuple[torch.Tensor, list[int]] | None:
        """See `fastcoll.all_to_all_single`."""
        return _C.all_to_all_single(
            output,
            input,
            output_split_sizes,
            input_split_sizes,
            self,
            async_op,
            timeout_s=timeout_s,
        )

    def all_to_all(
        self,
        output_tensor_list: Sequence[Array],
        input_tensor_list: Sequence[Array],
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.all_to_all`."""
        return _C.all_to_all(
            output_tensor_list, input_tensor_list, self, async_op, timeout_s=timeout_s
        )

    def all_reduce_coalesced(
        self,
        tensors: Sequence[Array],
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        *,
        algorithm: str = "auto",
        numerics: str | None = None,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.all_reduce_coalesced`."""
        return _C.all_reduce_coalesced(
            tensors,
            op,
            self,
            async_op,
            algorithm=algorithm,
            numerics=numerics,
            timeout_s=timeout_s,
        )

    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Sequence[Array],
        inputs: Sequence[Array],
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        *,
        algorithm: str = "auto",
        numerics: str | None = None,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.reduce_scatter_tensor_coalesced`."""
        return _C.reduce_scatter_tensor_coalesced(
            outputs,
            inputs,
            op,
            self,
            async_op,
            algorithm=algorithm,
            numerics=numerics,
            timeout_s=timeout_s,
        )

    def all_gather_into_tensor_coalesced(
        self,
        outputs: Sequence[Array],
        inputs: Sequence[Array],
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        """See `fastcoll.all_gather_into_tensor_coalesced`."""
        return _C.all_gather_into_tensor_coalesced(
            outputs, inputs, self, async_op, timeout_s=timeout_s
        )
