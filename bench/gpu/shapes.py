# SPDX-License-Identifier: Apache-2.0
"""Kernels on GPUs as no call starts them: in another shape, or of one step alone.

Decides the floor of a small call, and how packs and signals between two ranks are started.
Knows no clocks. Ranks are those of fastcoll.measure.gpu_ranks; everything runs in their current
streams, and requests of two ranks must be equal. Only `there_and_back` waits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from fastcoll.calls.tensors import Call, check
from fastcoll.errors import FastcollError
from fastcoll.measure.gpu_ranks import GpuRank
from fastcoll.native import _C
from fastcoll.types import Algorithm, DType, Op, Verb

if TYPE_CHECKING:
    from fastcoll.gpu.group import DeviceGroup

Shape: TypeAlias = tuple[int, int, int]  # blocks, threads, tile bytes: LaunchShape of shape.h
Bound: TypeAlias = Callable[[], None]

LIMIT_S = 8.0  # of a wait in a kernel: measured ranks are never late


def _group(me: GpuRank) -> "DeviceGroup":
    group = me.comm.device_group
    assert group is not None  # since the rank came up
    return group


def _stream(me: GpuRank) -> int:
    return int(torch.cuda.current_stream(me.device).cuda_stream)


@dataclass(frozen=True)
class AllReduce:
    """An all_reduce of a tensor into another one, and the plan that a call of it gets."""

    me: GpuRank
    source: torch.Tensor
    out: torch.Tensor
    algorithm: str = "auto"

    @property
    def plan(self) -> _C.Plan:
        """Return the plan by which `comm.all_reduce` would go."""
        me = self.me
        call = Call(
            verb=Verb.all_reduce, input=self.source, output=self.out, algorithm=self.algorithm
        )
        operands = check(call, me.rank, me.world_size)
        return me.comm.planner.plan(call, operands, _group(me).terms)

    @property
    def shape(self) -> Shape:
        """Return the shape of its launch."""
        from fastcoll.native import _cuda  # only now: without GPUs there may be no such extension

        return _cuda.shape_of(self.plan, self.me.world_size)

    def launched(self, shape: Shape) -> Bound:
        """Return a function that starts its kernel in a shape."""
        plan = self.plan
        return lambda: _launch(self.me, plan, (self.source.data_ptr(), self.out.data_ptr()), shape)

    def floor(self) -> Bound:
        """Return a function that starts the floor of any small call, in the shape of this one.

        The floor is an all_gather of nothing by LL packs. Each block exchanges one pack with the
        same block of every peer, as ranks meet, and reads and writes nothing else.
        """
        me, channels = self.me, self.plan.channels
        nothing = (DType.uint8, Op.SUM, Algorithm.direct, 0, 0, 0)
        plan = _C.Plan(Verb.all_gather, *nothing, False, True, 0, channels)
        shape = self.shape
        return lambda: _launch(me, plan, (0, 0), shape)


def _launch(me: GpuRank, plan: _C.Plan, ptrs: tuple[int, int], shape: Shape) -> None:
    _group(me).core.launch(plan, *ptrs, _stream(me), LIMIT_S, [], shape)


def there_and_back(me: GpuRank, step: str, rounds: int, token: int) -> float:
    """Return the nanoseconds of one way, where ranks 0 and 1 send each other `step`; collective.

    The kernel of each has one thread, which sends when it has seen the peer's. One way is half of a
    round by rank 0's clock, from the end of the first round on.

    Args:
        step: "signal", a word that is released and polled with acquire, or "ll_pack".
        token: Another one each time, the same on both ranks.
    """
    from fastcoll.native import _cuda

    me.synchronize()
    me.comm.barrier()
    answer = torch.zeros(2, dtype=torch.int64, device=me.device)
    me.comm.barrier()  # no rank asks for memory while a peer's kernel waits
    if me.rank < 2:
        _cuda.gauge_there_and_back(
            _group(me).core,
            getattr(_cuda.Gauge, step),
            1 - me.rank,
            rounds,
            token,
            answer.data_ptr(),
            _stream(me),
            LIMIT_S,
        )
    me.synchronize()
    me.comm.barrier()
    num_done, elapsed_ns = answer.tolist()
    if me.rank < 2 and num_done != rounds:
        raise FastcollError(
            f"{step} between ranks 0 and 1: {num_done} of {rounds} rounds were over on rank "
            f"{me.rank} in {LIMIT_S} s; their kernels must be resident together"
        )
    return float(elapsed_ns) / (rounds - 1) / 2


def copying(
    me: GpuRank, step: str, local: torch.Tensor, symmetric: torch.Tensor, blocks: int
) -> Bound:
    """Return a function that copies `local` into rank 1's part of a symmetric tensor, or out.

    Args:
        step: "put" or "get".
    """
    from fastcoll.native import _cuda

    core, gauge = _group(me).core, getattr(_cuda.Gauge, step)

    def start() -> None:
        ptrs, num_bytes = (local.data_ptr(), symmetric.data_ptr()), local.numel() * local.itemsize
        _cuda.gauge_copy(core, gauge, 1, *ptrs, num_bytes, blocks, _stream(me))

    return start
