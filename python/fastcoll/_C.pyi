# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Self, overload

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastcoll.calls.methods import VerbMethods
from fastcoll.calls.methods_of_pairs import P2PMethods, P2POp
from fastcoll.calls.transfer_work import AnyTransferWork
from fastcoll.calls.work import Work

K_INLINE_MAX_BYTES: int
K_SLOT_BYTES: int
K_NUM_SLOTS: int
K_MAX_WORLD: int
K_FAREWELL: int

class Plan:
    @property
    def verb(self) -> int: ...
    @property
    def dtype(self) -> int: ...
    @property
    def op(self) -> int: ...
    @property
    def algorithm(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def root(self) -> int: ...
    @property
    def segment_bytes(self) -> int: ...
    @property
    def fast_numerics(self) -> bool: ...
    @property
    def inline(self) -> bool: ...
    @property
    def splits(self) -> int: ...
    @property
    def channels(self) -> int: ...
    def __init__(
        self,
        verb: int,
        dtype: int,
        op: int,
        algorithm: int,
        numel: int,
        root: int,
        segment_bytes: int,
        fast_numerics: bool,
        inline: bool,
        splits: int = 0,
        channels: int = 0,
    ) -> None: ...

class TransferWork:
    @property
    def _kept(self) -> Any: ...
    def __new__(
        cls,
        group: Group,
        sends: bool,
        peer: int,
        tag: int,
        dtype: int,
        numel: int,
        ptr: int,
        timeout_s: float,
        kept: object,
    ) -> Self: ...
    def wait(self, timeout: float | timedelta | None = None) -> bool: ...
    def is_completed(self) -> bool: ...
    def source_rank(self) -> int: ...
    def _wait_for(self, seconds: float) -> bool: ...
    def _withdraw(self) -> bool: ...

class CallWork:
    _outputs: list[Any]
    def wait(self, timeout: float | timedelta | None = None) -> bool: ...
    def is_completed(self) -> bool: ...
    def _wait_for(self, seconds: float) -> bool: ...

class Group:
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def traces(self) -> bool: ...
    def __init__(
        self,
        rank: int,
        world_size: int,
        name: str,
        region_fds: list[int],
        socket_fds: list[int],
        pidfds: list[int],
        timeout_s: float,
        num_cpus: int,
        pids: list[int] = ...,
        traces: bool = ...,
    ) -> None: ...
    def run(self, plan: Plan, input_ptr: int, output_ptr: int, timeout_s: float) -> None: ...
    def run_parts(
        self,
        plan: Plan,
        inputs: Sequence[tuple[int, int]],
        outputs: Sequence[tuple[int, int]],
        timeout_s: float,
    ) -> None: ...
    def run_list(
        self, plan: Plan, pieces: Sequence[tuple[int, int, int]], timeout_s: float
    ) -> None: ...
    def drive(self) -> None: ...
    def refuse_handler(self) -> None: ...
    def has_open_transfers(self) -> bool: ...
    def set_limit(self, limit_s: float) -> None: ...
    def cache_plan(
        self,
        plan: Plan,
        asks_algorithm: bool,
        fast_numerics: bool | None,
        numels: tuple[int, int],
    ) -> None: ...
    def add_program(
        self, hash: int, blocks: tuple[int, int, int], words: Sequence[int]
    ) -> None: ...
    def try_single_copy(self, is_wanted: bool, always: bool) -> list[int]: ...
    def add_arena(self, fds: list[int], num_bytes: int) -> int: ...
    def arena_ptr(self, arena_idx: int) -> int: ...
    def remove_arena(self, arena_idx: int) -> None: ...
    def async_begin(self) -> None: ...
    def async_end(self) -> None: ...
    def await_native(self) -> None: ...
    def idle(self) -> bool: ...
    def check(self) -> None: ...
    def poison(self, message: str) -> None: ...
    def abort(self, reason: str = ...) -> None: ...
    def fail(self, kind: int, text: str, ranks: Sequence[int]) -> NoReturn: ...
    def peer_is_gone(self, peer: int) -> bool: ...
    def hold_parts(self, ranks: int) -> None: ...
    def parts_held(self) -> list[int]: ...
    def decide_survivors(self, ranks: int) -> int: ...
    def close(self) -> None: ...

def reduce_arrays(dtype: int, op: int, sources: Sequence[int], target: int, numel: int) -> None: ...
def widen_array(dtype: int, source: int, target: int, numel: int) -> None: ...
def finish_array(
    dtype: int, op: int, source: int, target: int, numel: int, world_size: int
) -> None: ...
def printable(text: bytes) -> str: ...
def find_call_site() -> str: ...
def set_call_site(site: str) -> str: ...
def hide_folders(folders: list[str]) -> None: ...
def region_bytes() -> int: ...
def read_status(fd: int) -> dict[str, Any]: ...
def mapped_bytes(world_size: int) -> int: ...
def memfd_create(name: str, num_bytes: int) -> int: ...
def limit_behind(error: int) -> str: ...
def uneven_splits(numels: Sequence[int]) -> int: ...
def list_splits(tensors: Sequence[tuple[int, int]], dtype: int) -> int: ...
def spread_out(cpus: list[int], rank: int) -> bool: ...
def simd_levels() -> list[str]: ...
def simd_level() -> str: ...
def set_simd_level(name: str) -> None: ...
def time_loop(
    group: Group, plan: Plan, input_ptr: int, output_ptr: int, iterations: int
) -> float: ...
def time_one_way_flag(group: Group, iterations: int) -> float: ...
def set_default_group(group: Group | None) -> None: ...
def set_reduce_ops(ops: Sequence[object]) -> None: ...
def set_tensor_types(types: Sequence[type]) -> None: ...
def learn_tensor_layout(samples: tuple[tuple[object, ...], ...]) -> bool: ...
def set_numpy_type(type: type) -> None: ...
def set_numpy_integers(types: tuple[type, ...]) -> None: ...
def set_call_work(cls: type[CallWork]) -> None: ...
def set_transfer_work(cls: type[TransferWork]) -> None: ...
def set_p2p_op_type(cls: type[P2POp]) -> None: ...
def set_stand_in(group: ProcessGroup, comm: Group, global_ranks: list[int]) -> None: ...
def set_fallback(name: str, fn: Callable[..., object]) -> None: ...
def dtype_names() -> list[str]: ...
def op_names() -> list[str]: ...
def verb_names() -> list[str]: ...
def algorithm_names() -> list[str]: ...

_Array = torch.Tensor | np.ndarray[Any, Any]
_GroupLike = Group | VerbMethods | P2PMethods | ProcessGroup | int | None

def all_reduce(
    tensor: _Array,
    op: Any = ...,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    out: _Array | None = None,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
) -> Work | None: ...
def reduce_scatter_tensor(
    output: _Array,
    input: _Array,
    op: Any = ...,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
) -> Work | None: ...
def all_gather_into_tensor(
    output_tensor: _Array,
    input_tensor: _Array,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
) -> Work | None: ...
def broadcast(
    tensor: _Array,
    src: int | None = None,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
    group_src: int | None = None,
) -> Work | None: ...
def barrier(
    group: _GroupLike = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    *,
    timeout_s: float | None = None,
) -> Work | None: ...
def reduce(
    tensor: _Array,
    dst: int | None = None,
    op: Any = ...,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    out: _Array | None = None,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
    group_dst: int | None = None,
) -> Work | None: ...
def all_gather(
    tensor_list: Sequence[_Array],
    tensor: _Array,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
) -> Work | None: ...
def reduce_scatter(
    output: _Array,
    input_list: Sequence[_Array],
    op: Any = ...,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
) -> Work | None: ...
def gather(
    tensor: _Array,
    gather_list: Sequence[_Array] | None = None,
    dst: int | None = None,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
    group_dst: int | None = None,
) -> Work | None: ...
def gather_single(
    tensor: _Array,
    gather_tensor: _Array | None = None,
    dst: int | None = None,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
    group_dst: int | None = None,
) -> Work | None: ...
def scatter(
    tensor: _Array,
    scatter_list: Sequence[_Array] | None = None,
    src: int | None = None,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
    group_src: int | None = None,
) -> Work | None: ...
def all_to_all_single(
    output: _Array | None,
    input: _Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
) -> Work | tuple[torch.Tensor, list[int]] | None: ...
def all_to_all(
    output_tensor_list: Sequence[_Array],
    input_tensor_list: Sequence[_Array],
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
) -> Work | None: ...
def send(
    tensor: _Array,
    dst: int | None = None,
    group: _GroupLike = None,
    tag: int = 0,
    *,
    timeout_s: float | None = None,
    group_dst: int | None = None,
) -> None: ...
def recv(
    tensor: _Array,
    src: int | None = None,
    group: _GroupLike = None,
    tag: int = 0,
    *,
    timeout_s: float | None = None,
    group_src: int | None = None,
) -> int: ...
@overload
def isend(
    tensor: _Array, dst: int, group: P2PMethods, tag: int = 0, *, timeout_s: float | None = None
) -> AnyTransferWork: ...
@overload
def isend(
    tensor: _Array,
    dst: int | None = None,
    group: _GroupLike = None,
    tag: int = 0,
    *,
    timeout_s: float | None = None,
    group_dst: int | None = None,
) -> AnyTransferWork | None: ...
@overload
def irecv(
    tensor: _Array,
    src: int | None,
    group: P2PMethods,
    tag: int = 0,
    *,
    timeout_s: float | None = None,
) -> AnyTransferWork: ...
@overload
def irecv(
    tensor: _Array,
    src: int | None = None,
    group: _GroupLike = None,
    tag: int = 0,
    *,
    timeout_s: float | None = None,
    group_src: int | None = None,
) -> AnyTransferWork | None: ...
def batch_isend_irecv(
    p2p_op_list: list[P2POp] | list[dist.P2POp], group: _GroupLike = None
) -> list[AnyTransferWork]: ...
def all_reduce_coalesced(
    tensors: Sequence[_Array],
    op: Any = ...,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
) -> Work | None: ...
def reduce_scatter_tensor_coalesced(
    outputs: Sequence[_Array],
    inputs: Sequence[_Array],
    op: Any = ...,
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
) -> Work | None: ...
def all_gather_into_tensor_coalesced(
    outputs: Sequence[_Array],
    inputs: Sequence[_Array],
    group: _GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
) -> Work | None: ...
