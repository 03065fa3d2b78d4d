# SPDX-License-Identifier: Apache-2.0
# Written by scripts/verbs.py from the declarations in python/fastcoll/api.
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from fastcoll.calls.arrays import Array
from fastcoll.calls.batches import P2POp
from fastcoll.calls.transfer_work import AnyTransferWork
from fastcoll.calls.work import Work
from fastcoll.types import ReduceOp

class VerbMethods:
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
    ) -> Work | None: ...
    def reduce(
        self,
        tensor: Array,
        dst: int | None = None,
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        *,
        out: Array | None = None,
        algorithm: str = "auto",
        numerics: str | None = None,
        timeout_s: float | None = None,
        group_dst: int | None = None,
    ) -> Work | None: ...
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
    ) -> Work | None: ...
    reduce_scatter_single = reduce_scatter_tensor
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
    ) -> Work | None: ...
    def broadcast(
        self,
        tensor: Array,
        src: int | None = None,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
        group_src: int | None = None,
    ) -> Work | None: ...
    def all_gather(
        self,
        tensor_list: Sequence[Array],
        tensor: Array,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None: ...
    def all_gather_into_tensor(
        self,
        output_tensor: Array,
        input_tensor: Array,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None: ...
    all_gather_single = all_gather_into_tensor
    def gather(
        self,
        tensor: Array,
        gather_list: Sequence[Array] | None = None,
        dst: int | None = None,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
        group_dst: int | None = None,
    ) -> Work | None: ...
    def gather_single(
        self,
        tensor: Array,
        gather_tensor: Array | None = None,
        dst: int | None = None,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
        group_dst: int | None = None,
    ) -> Work | None: ...
    gather_into_tensor = gather_single
    def scatter(
        self,
        tensor: Array,
        scatter_list: Sequence[Array] | None = None,
        src: int | None = None,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
        group_src: int | None = None,
    ) -> Work | None: ...
    def all_to_all_single(
        self,
        output: Array | None,
        input: Array,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | tuple[torch.Tensor, list[int]] | None: ...
    def all_to_all(
        self,
        output_tensor_list: Sequence[Array],
        input_tensor_list: Sequence[Array],
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None: ...
    def barrier(
        self,
        async_op: bool = False,
        device_ids: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Work | None: ...
    def all_reduce_coalesced(
        self,
        tensors: Sequence[Array],
        op: object = ReduceOp.SUM,
        async_op: bool = False,
        *,
        algorithm: str = "auto",
        numerics: str | None = None,
        timeout_s: float | None = None,
    ) -> Work | None: ...
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
    ) -> Work | None: ...
    def all_gather_into_tensor_coalesced(
        self,
        outputs: Sequence[Array],
        inputs: Sequence[Array],
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None: ...
    def send(
        self,
        tensor: Array,
        dst: int | None = None,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
        group_dst: int | None = None,
    ) -> None: ...
    def recv(
        self,
        tensor: Array,
        src: int | None = None,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
        group_src: int | None = None,
    ) -> int: ...
    def isend(
        self,
        tensor: Array,
        dst: int | None = None,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
        group_dst: int | None = None,
    ) -> AnyTransferWork: ...
    def irecv(
        self,
        tensor: Array,
        src: int | None = None,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
        group_src: int | None = None,
    ) -> AnyTransferWork: ...
    def batch_isend_irecv(
        self, p2p_op_list: list[P2POp] | list[dist.P2POp]
    ) -> list[AnyTransferWork]: ...
