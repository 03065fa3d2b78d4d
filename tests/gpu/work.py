# SPDX-License-Identifier: Apache-2.0
"""Calls on GPUs, their inputs, and what the CPU makes of the same inputs.

Decides data (any bits at all, or numbers whose sum depends on the order; fresh for every seed)
and how results are compared: bit for bit, outputs poisoned before the call.
"""

import dataclasses
from typing import Any

import torch

from fastcoll.measure.gpu_ranks import GpuRank
from fastcoll.types import TORCH_DTYPES, DType, ReduceOp, supported_ops

REDUCTIONS = ("all_reduce", "reduce_scatter")
_POISON = 0xA5
_GUARD = 64  # bytes before and after an output


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `offset`: elements from an aligned address."""

    verb: str
    dtype: DType
    numel: int
    op: str = "SUM"
    algorithm: str = "auto"
    in_place: bool = False
    offset: int = 0
    seed: int = 0


def data(numel: int, dtype: torch.dtype, seed: int, any_bits: bool) -> torch.Tensor:
    """Fresh numbers on the CPU: any bits at all, or of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if any_bits or not (dtype.is_floating_point or dtype.is_complex):
        num_bytes = numel * dtype.itemsize
        return torch.randint(0, 256, (num_bytes,), generator=generator).to(torch.uint8).view(dtype)
    lanes = 2 if dtype.is_complex else 1
    numbers = torch.randn(numel * lanes, generator=generator, dtype=torch.float64)
    scale = torch.randint(-8, 9, (numel * lanes,), generator=generator)
    numbers = numbers * 2.0**scale
    if dtype.is_complex:
        return torch.view_as_complex(numbers.view(-1, 2)).to(dtype)
    return numbers.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)


class Buffer:
    """A tensor in the middle of poisoned bytes."""

    def __init__(self, numel: int, dtype: torch.dtype, device: Any, offset: int) -> None:
        size = dtype.itemsize
        start = _GUARD + offset * size
        self.memory = torch.full(
            (start + numel * size + _GUARD,), _POISON, dtype=torch.uint8, device=device
        )
        # A pack of padding keeps the view aligned for its dtype whatever the offset.
        self.inner = slice(start, start + numel * size)
        self.tensor = self.memory[self.inner].view(dtype)

    def untouched_around(self) -> bool:
        outside = torch.cat([self.memory[: self.inner.start], self.memory[self.inner.stop :]])
        return bool((outside == _POISON).all())


def perform(me: GpuRank, cases: list[Case]) -> list[str]:
    """Make the calls on this rank's GPU and on its CPU; what differs, as texts."""
    prepared = [_prepare(me, case) for case in cases]
    me.synchronize()
    me.comm.barrier()  # nobody allocates any more: that could wait for kernels that run
    for case, (source, target, _) in zip(cases, prepared, strict=True):
        call(me.comm, case, source.tensor, target.tensor)
    me.synchronize()
    me.comm.check()
    problems = []
    for case, (source, target, given) in zip(cases, prepared, strict=True):
        wanted = expected(me, case, given)
        got = bits(target.tensor)
        if not torch.equal(got, bits(wanted)):
            wrong = (got != bits(wanted)).nonzero().flatten()
            first = int(wrong[0])
            problems.append(
                f"rank {me.rank}: {len(wrong)} bytes differ, first byte {first} is "
                f"{int(got[first]):#x}, not {int(bits(wanted)[first]):#x}: {case}"
            )
        if not (target.untouched_around() and source.untouched_around()):
            problems.append(f"rank {me.rank} wrote outside its output: {case}")
        if source is not target and not torch.equal(bits(source.tensor), bits(given)):
            problems.append(f"rank {me.rank} changed its input: {case}")
    return problems


def _prepare(me: GpuRank, case: Case) -> tuple[Buffer, Buffer, torch.Tensor]:
    dtype = TORCH_DTYPES[case.dtype]
    world = me.world_size
    num_in = case.numel * (world if case.verb == "reduce_scatter" else 1)
    num_out = case.numel * (world if case.verb == "all_gather" else 1)
    given = data(num_in, dtype, case.seed * 1000 + me.rank, any_bits=case.seed % 2 == 1)
    source = Buffer(num_in, dtype, me.device, case.offset)
    source.tensor.copy_(given)
    shared = case.verb == "broadcast" or (case.in_place and case.verb == "all_reduce")
    target = source if shared else Buffer(num_out, dtype, me.device, case.offset)
    return source, target, given


def call(comm: Any, case: Case, source: torch.Tensor, target: torch.Tensor, **more: Any) -> Any:
    """Make the call of a case."""
    op = getattr(ReduceOp, case.op)
    if case.verb == "all_reduce":
        out = {} if source is target else {"out": target}
        return comm.all_reduce(source, op, algorithm=case.algorithm, **out, **more)
    if case.verb == "reduce_scatter":
        return comm.reduce_scatter_tensor(target, source, op, algorithm=case.algorithm, **more)
    if case.verb == "all_gather":
        return comm.all_gather_into_tensor(target, source, **more)
    return comm.broadcast(target, 0, **more)


def expected(me: GpuRank, case: Case, given: torch.Tensor) -> torch.Tensor:
    """The result of the same call on the CPU. Collective."""
    source = given.clone()
    world = me.world_size
    numel = case.numel * (world if case.verb == "all_gather" else 1)
    shared = case.verb in ("broadcast",)
    target = source if shared else torch.empty(numel, dtype=given.dtype)
    # On the CPU every algorithm gives the same bits, so the choice is its own.
    numerics = {"numerics": "same_bits"} if case.verb in REDUCTIONS else {}
    cpu_case = dataclasses.replace(case, algorithm="auto")
    call(me.comm, cpu_case, source, target, **numerics)
    return target


def ops_of(dtype: DType) -> list[str]:
    return [op.name for op in supported_ops(dtype)]
