# SPDX-License-Identifier: Apache-2.0
# Written by scripts/verbs.py from the declarations in python/fastcoll/api.
# fmt: off
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, overload

import torch
import torch.distributed as dist

from fastcoll.calls.arrays import Array
from fastcoll.calls.batches import P2POp
from fastcoll.calls.epilogues import TritonEpilogue
from fastcoll.calls.rows import RMSNorm
from fastcoll.calls.transfer_work import AnyTransferWork
from fastcoll.calls.work import Work
from fastcoll.types import OpLike

class VerbMethods:
    @overload
    def all_reduce(
        self, tensor: Array, op: OpLike = "sum", async_op: Literal[False] = False, *,
        out: Array | None = None, then: RMSNorm | TritonEpilogue | None = None,
        wire: str | None = None, algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None
    ) -> None: ...
    @overload
    def all_reduce(
        self, tensor: Array, op: OpLike = "sum", *, async_op: Literal[True],
        out: Array | None = None, then: RMSNorm | TritonEpilogue | None = None,
        wire: str | None = None, algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None
    ) -> Work: ...
    @overload
    def all_reduce(
        self, tensor: Array, op: OpLike = "sum", async_op: bool = False, *,
        out: Array | None = None, then: RMSNorm | TritonEpilogue | None = None,
        wire: str | None = None, algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None
    ) -> Work | None: ...
    @overload
    def reduce(
        self, tensor: Array, dst: int | None = None, op: OpLike = "sum",
        async_op: Literal[False] = False, *, out: Array | None = None, algorithm: str = "auto",
        numerics: str | None = None, timeout_s: float | None = None, group_dst: int | None = None
    ) -> None: ...
    @overload
    def reduce(
        self, tensor: Array, dst: int | None = None, op: OpLike = "sum", *, async_op: Literal[True],
        out: Array | None = None, algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None, group_dst: int | None = None
    ) -> Work: ...
    @overload
    def reduce(
        self, tensor: Array, dst: int | None = None, op: OpLike = "sum", async_op: bool = False, *,
        out: Array | None = None, algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None, group_dst: int | None = None
    ) -> Work | None: ...
    @overload
    def reduce_scatter_tensor(
        self, output: Array, input: Array, op: OpLike = "sum", async_op: Literal[False] = False, *,
        then: RMSNorm | TritonEpilogue | None = None, wire: str | None = None,
        algorithm: str = "auto", numerics: str | None = None, timeout_s: float | None = None
    ) -> None: ...
    @overload
    def reduce_scatter_tensor(
        self, output: Array, input: Array, op: OpLike = "sum", *, async_op: Literal[True],
        then: RMSNorm | TritonEpilogue | None = None, wire: str | None = None,
        algorithm: str = "auto", numerics: str | None = None, timeout_s: float | None = None
    ) -> Work: ...
    @overload
    def reduce_scatter_tensor(
        self, output: Array, input: Array, op: OpLike = "sum", async_op: bool = False, *,
        then: RMSNorm | TritonEpilogue | None = None, wire: str | None = None,
        algorithm: str = "auto", numerics: str | None = None, timeout_s: float | None = None
    ) -> Work | None: ...
    reduce_scatter_single = reduce_scatter_tensor
    @overload
    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: OpLike = "sum",
        async_op: Literal[False] = False, *, algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None
    ) -> None: ...
    @overload
    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: OpLike = "sum", *,
        async_op: Literal[True], algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: OpLike = "sum",
        async_op: bool = False, *, algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None
    ) -> Work | None: ...
    @overload
    def broadcast(
        self, tensor: Array, src: int | None = None, async_op: Literal[False] = False, *,
        timeout_s: float | None = None, group_src: int | None = None
    ) -> None: ...
    @overload
    def broadcast(
        self, tensor: Array, src: int | None = None, *, async_op: Literal[True],
        timeout_s: float | None = None, group_src: int | None = None
    ) -> Work: ...
    @overload
    def broadcast(
        self, tensor: Array, src: int | None = None, async_op: bool = False, *,
        timeout_s: float | None = None, group_src: int | None = None
    ) -> Work | None: ...
    @overload
    def all_gather(
        self, tensor_list: Sequence[Array], tensor: Array, async_op: Literal[False] = False, *,
        timeout_s: float | None = None
    ) -> None: ...
    @overload
    def all_gather(
        self, tensor_list: Sequence[Array], tensor: Array, *, async_op: Literal[True],
        timeout_s: float | None = None
    ) -> Work: ...
    @overload
    def all_gather(
        self, tensor_list: Sequence[Array], tensor: Array, async_op: bool = False, *,
        timeout_s: float | None = None
    ) -> Work | None: ...
    @overload
    def all_gather_into_tensor(
        self, output_tensor: Array, input_tensor: Array, async_op: Literal[False] = False, *,
        timeout_s: float | None = None
    ) -> None: ...
    @overload
    def all_gather_into_tensor(
        self, output_tensor: Array, input_tensor: Array, *, async_op: Literal[True],
        timeout_s: float | None = None
    ) -> Work: ...
    @overload
    def all_gather_into_tensor(
        self, output_tensor: Array, input_tensor: Array, async_op: bool = False, *,
        timeout_s: float | None = None
    ) -> Work | None: ...
    all_gather_single = all_gather_into_tensor
    @overload
    def gather(
        self, tensor: Array, gather_list: Sequence[Array] | None = None, dst: int | None = None,
        async_op: Literal[False] = False, *, timeout_s: float | None = None,
        group_dst: int | None = None
    ) -> None: ...
    @overload
    def gather(
        self, tensor: Array, gather_list: Sequence[Array] | None = None, dst: int | None = None, *,
        async_op: Literal[True], timeout_s: float | None = None, group_dst: int | None = None
    ) -> Work: ...
    @overload
    def gather(
        self, tensor: Array, gather_list: Sequence[Array] | None = None, dst: int | None = None,
        async_op: bool = False, *, timeout_s: float | None = None, group_dst: int | None = None
    ) -> Work | None: ...
    @overload
    def gather_single(
        self, tensor: Array, gather_tensor: Array | None = None, dst: int | None = None,
        async_op: Literal[False] = False, *, timeout_s: float | None = None,
        group_dst: int | None = None
    ) -> None: ...
    @overload
    def gather_single(
        self, tensor: Array, gather_tensor: Array | None = None, dst: int | None = None, *,
        async_op: Literal[True], timeout_s: float | None = None, group_dst: int | None = None
    ) -> Work: ...
    @overload
    def gather_single(
        self, tensor: Array, gather_tensor: Array | None = None, dst: int | None = None,
        async_op: bool = False, *, timeout_s: float | None = None, group_dst: int | None = None
    ) -> Work | None: ...
    gather_into_tensor = gather_single
    @overload
    def scatter(
        self, tensor: Array, scatter_list: Sequence[Array] | None = None, src: int | None = None,
        async_op: Literal[False] = False, *, timeout_s: float | None = None,
        group_src: int | None = None
    ) -> None: ...
    @overload
    def scatter(
        self, tensor: Array, scatter_list: Sequence[Array] | None = None, src: int | None = None, *,
        async_op: Literal[True], timeout_s: float | None = None, group_src: int | None = None
    ) -> Work: ...
    @overload
    def scatter(
        self, tensor: Array, scatter_list: Sequence[Array] | None = None, src: int | None = None,
        async_op: bool = False, *, timeout_s: float | None = None, group_src: int | None = None
    ) -> Work | None: ...
    @overload
    def all_to_all_single(
        self, output: None, input: Array, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, async_op: Literal[False] = False, *,
        timeout_s: float | None = None
    ) -> tuple[torch.Tensor, list[int]]: ...
    @overload
    def all_to_all_single(
        self, output: Array, input: Array, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, async_op: Literal[False] = False, *,
        timeout_s: float | None = None
    ) -> None: ...
    @overload
    def all_to_all_single(
        self, output: Array, input: Array, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, *, async_op: Literal[True],
        timeout_s: float | None = None
    ) -> Work: ...
    @overload
    def all_to_all_single(
        self, output: Array, input: Array, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, async_op: bool = False, *,
        timeout_s: float | None = None
    ) -> Work | None: ...
    @overload
    def all_to_all(
        self, output_tensor_list: Sequence[Array], input_tensor_list: Sequence[Array],
        async_op: Literal[False] = False, *, timeout_s: float | None = None
    ) -> None: ...
    @overload
    def all_to_all(
        self, output_tensor_list: Sequence[Array], input_tensor_list: Sequence[Array], *,
        async_op: Literal[True], timeout_s: float | None = None
    ) -> Work: ...
    @overload
    def all_to_all(
        self, output_tensor_list: Sequence[Array], input_tensor_list: Sequence[Array],
        async_op: bool = False, *, timeout_s: float | None = None
    ) -> Work | None: ...
    @overload
    def barrier(
        self, async_op: Literal[False] = False, device_ids: Sequence[int] | None = None,
        timeout: timedelta | None = None, *, timeout_s: float | None = None
    ) -> None: ...
    @overload
    def barrier(
        self, *, async_op: Literal[True], device_ids: Sequence[int] | None = None,
        timeout: timedelta | None = None, timeout_s: float | None = None
    ) -> Work: ...
    @overload
    def barrier(
        self, async_op: bool = False, device_ids: Sequence[int] | None = None,
        timeout: timedelta | None = None, *, timeout_s: float | None = None
    ) -> Work | None: ...
    @overload
    def all_reduce_coalesced(
        self, tensors: Sequence[Array], op: OpLike = "sum", async_op: Literal[False] = False, *,
        wire: str | None = None, algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None
    ) -> None: ...
    @overload
    def all_reduce_coalesced(
        self, tensors: Sequence[Array], op: OpLike = "sum", *, async_op: Literal[True],
        wire: str | None = None, algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None
    ) -> Work: ...
    @overload
    def all_reduce_coalesced(
        self, tensors: Sequence[Array], op: OpLike = "sum", async_op: bool = False, *,
        wire: str | None = None, algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None
    ) -> Work | None: ...
    @overload
    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Array], inputs: Sequence[Array], op: OpLike = "sum",
        async_op: Literal[False] = False, *, algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None
    ) -> None: ...
    @overload
    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Array], inputs: Sequence[Array], op: OpLike = "sum", *,
        async_op: Literal[True], algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None
    ) -> Work: ...
    @overload
    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Array], inputs: Sequence[Array], op: OpLike = "sum",
        async_op: bool = False, *, algorithm: str = "auto", numerics: str | None = None,
        timeout_s: float | None = None
    ) -> Work | None: ...
    @overload
    def all_gather_into_tensor_coalesced(
        self, outputs: Sequence[Array], inputs: Sequence[Array], async_op: Literal[False] = False,
        *, timeout_s: float | None = None
    ) -> None: ...
    @overload
    def all_gather_into_tensor_coalesced(
        self, outputs: Sequence[Array], inputs: Sequence[Array], *, async_op: Literal[True],
        timeout_s: float | None = None
    ) -> Work: ...
    @overload
    def all_gather_into_tensor_coalesced(
        self, outputs: Sequence[Array], inputs: Sequence[Array], async_op: bool = False, *,
        timeout_s: float | None = None
    ) -> Work | None: ...
    def send(
        self, tensor: Array, dst: int | None = None, tag: int = 0, *,
        timeout_s: float | None = None, group_dst: int | None = None
    ) -> None: ...
    def recv(
        self, tensor: Array, src: int | None = None, tag: int = 0, *,
        timeout_s: float | None = None, group_src: int | None = None
    ) -> int: ...
    def isend(
        self, tensor: Array, dst: int | None = None, tag: int = 0, *,
        timeout_s: float | None = None, group_dst: int | None = None
    ) -> AnyTransferWork: ...
    def irecv(
        self, tensor: Array, src: int | None = None, tag: int = 0, *,
        timeout_s: float | None = None, group_src: int | None = None
    ) -> AnyTransferWork: ...
    def batch_isend_irecv(
        self, p2p_op_list: list[P2POp] | list[dist.P2POp]
    ) -> list[AnyTransferWork]: ...
