# SPDX-License-Identifier: Apache-2.0
"""Calls on GPUs, their inputs, and what the CPU makes of the same inputs.

Decides data (any bits at all, or numbers whose sum depends on the order; fresh for every seed)
and how results are compared: bit for bit, outputs poisoned before the call.
"""

import dataclasses
from typing import Any

import torch

from fastcoll.calls.batches import P2POp
from fastcoll.measure.gpu_ranks import GpuRank
from fastcoll.types import TORCH_DTYPES, DType, ReduceOp, supported_ops

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
# Parts of any size; "exchange" is a batch of sends and receives.
UNEVEN = ("all_to_all_splits", "all_to_all_list", "all_gather_list", "exchange")
_POISON = 0xA5
_GUARD = 64  # bytes before and after an output


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `offset`: elements from an aligned address.

    `in_place`: the smaller of input and output is this rank's part of the larger one.
    """

    verb: str
    dtype: DType
    numel: int
    op: str = "SUM"
    algorithm: str = "auto"
    in_place: bool = False
    offset: int = 0
    seed: int = 0
    root: int = 0

    def numel_of(self, by: int, to: int) -> int:
        """Elements that one rank gives another, where parts have any size."""
        other = by if self.verb == "all_gather_list" else to
        return self.numel * (3 * by + 5 * other + 1) % (self.numel + 3)

    def parts(self, rank: int, world: int) -> tuple[list[int], list[int]]:
        """Elements of what a rank gives each other one, and of what it gets."""
        one, many = [self.numel], [self.numel] * world
        if self.verb == "all_gather_list":
            return [self.numel_of(rank, 0)], [self.numel_of(by, 0) for by in range(world)]
        if self.verb in UNEVEN:
            ranks = range(world)
            return [self.numel_of(rank, r) for r in ranks], [self.numel_of(r, rank) for r in ranks]
        cut_in = self.verb in ("reduce_scatter", "scatter", "all_to_all")
        cut_out = self.verb in ("all_gather", "gather", "all_to_all")
        return many if cut_in else one, many if cut_out else one

    def gets(self, rank: int) -> bool:
        """Whether a rank has a result."""
        return self.verb not in ("gather", "reduce") or rank == self.root


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


@dataclasses.dataclass
class Prepared:
    """A case with its memory on this rank's device; `given` is a copy of the input on the CPU."""

    case: Case
    source: torch.Tensor
    target: torch.Tensor
    buffers: tuple[Buffer, ...]
    given: torch.Tensor

    def problems(self, me: GpuRank) -> list[str]:
        """What is wrong after the call. Collective, as the CPU's result comes of a call too."""
        case = self.case
        wanted = expected(me, case, self.given)
        found = []
        if not case.gets(me.rank):
            if len(self.buffers) > 1 and bool((bits(self.target) != _POISON).any()):
                found.append(f"rank {me.rank} has a result that is the root's alone: {case}")
        elif not torch.equal(got := bits(self.target), bits(wanted)):
            wrong = (got != bits(wanted)).nonzero().flatten()
            first = int(wrong[0])
            found.append(
                f"rank {me.rank}: {len(wrong)} bytes differ, first byte {first} is "
                f"{int(got[first]):#x}, not {int(bits(wanted)[first]):#x}: {case}"
            )
        if not all(buffer.untouched_around() for buffer in self.buffers):
            found.append(f"rank {me.rank} wrote outside its output: {case}")
        if len(self.buffers) > 1 and not torch.equal(bits(self.source), bits(self.given)):
            found.append(f"rank {me.rank} changed its input: {case}")
        return found


def perform(me: GpuRank, cases: list[Case]) -> list[str]:
    """Make the calls on this rank's GPU and on its CPU; what differs, as texts."""
    prepared = [_prepare(me, case) for case in cases]
    _fill_cache(prepared)
    me.synchronize()
    me.comm.barrier()  # nobody asks the driver for memory any more: that could wait for kernels
    for one in prepared:
        call(me.comm, one.case, one.source, one.target)
    me.synchronize()
    me.comm.check()
    me.comm.barrier()  # to look asks for memory, too, and a rank without a result is here early
    return [problem for one in prepared for problem in one.problems(me)]


def _fill_cache(prepared: list[Prepared]) -> None:
    """Let torch have all the memory that lists will be put together in."""
    pieces = [x for one in prepared if one.case.verb in UNEVEN for x in (one.source, one.target)]
    kept = [torch.empty_like(piece) for piece in pieces]
    del kept


def _prepare(me: GpuRank, case: Case) -> Prepared:
    dtype = TORCH_DTYPES[case.dtype]
    num_in, num_out = (sum(part) for part in case.parts(me.rank, me.world_size))
    given = data(num_in, dtype, case.seed * 1000 + me.rank, any_bits=case.seed % 2 == 1)
    if case.verb == "broadcast" or case.in_place:
        whole = Buffer(max(num_in, num_out), dtype, me.device, case.offset)
        part = slice(me.rank * case.numel, (me.rank + 1) * case.numel)
        source = whole.tensor[part] if num_in < num_out else whole.tensor
        target = whole.tensor[part] if num_out < num_in else whole.tensor
        source.copy_(given)
        return Prepared(case, source, target, (whole,), given)
    buffers = tuple(Buffer(n, dtype, me.device, case.offset) for n in (num_in, num_out))
    buffers[0].tensor.copy_(given)
    return Prepared(case, buffers[0].tensor, buffers[1].tensor, buffers, given)


def _backwards(tensor: torch.Tensor, numels: list[int]) -> list[torch.Tensor]:
    """Parts that lie one after another in the wrong order."""
    return list(tensor.split(numels[::-1]))[::-1]


def call(comm: Any, case: Case, source: torch.Tensor, target: torch.Tensor, **more: Any) -> Any:
    """Make the call of a case."""
    if case.verb in REDUCTIONS:
        return _reduction(comm, case, source, target, **more)
    if case.verb in UNEVEN:
        return _uneven(comm, case, source, target)
    gives, gets = case.parts(comm.rank, comm.world_size)
    at_root = comm.rank == case.root
    if case.verb == "all_gather":
        return comm.all_gather_into_tensor(target, source)
    if case.verb == "broadcast":
        return comm.broadcast(target, case.root)
    if case.verb == "gather":
        return comm.gather(source, list(target.split(gets)) if at_root else None, case.root)
    if case.verb == "scatter":
        return comm.scatter(target, list(source.split(gives)) if at_root else None, case.root)
    return comm.all_to_all_single(target, source)


def _reduction(
    comm: Any, case: Case, source: torch.Tensor, target: torch.Tensor, **more: Any
) -> Any:
    op = getattr(ReduceOp, case.op)
    more |= {"algorithm": case.algorithm}
    if case.verb == "reduce_scatter":
        return comm.reduce_scatter_tensor(target, source, op, **more)
    if source is not target:
        more |= {"out": target}
    if case.verb == "reduce":
        return comm.reduce(source, case.root, op, **more)
    return comm.all_reduce(source, op, **more)


def _uneven(comm: Any, case: Case, source: torch.Tensor, target: torch.Tensor) -> Any:
    gives, gets = case.parts(comm.rank, comm.world_size)
    if case.verb == "all_to_all_splits":
        return comm.all_to_all_single(target, source, gets, gives)
    if case.verb == "all_to_all_list":
        return comm.all_to_all(_backwards(target, gets), _backwards(source, gives))
    if case.verb == "all_gather_list":
        return comm.all_gather(_backwards(target, gets), source)
    ops = [P2POp("isend", part, to, tag=case.seed) for to, part in enumerate(source.split(gives))]
    ops += [P2POp("irecv", part, by, tag=case.seed) for by, part in enumerate(target.split(gets))]
    for started in comm.batch_isend_irecv(ops):
        started.wait()
    return None


def expected(me: GpuRank, case: Case, given: torch.Tensor) -> torch.Tensor:
    """The result of the same call on the CPU. Collective."""
    source = given.clone()
    numel = sum(case.parts(me.rank, me.world_size)[1])
    target = source if case.verb == "broadcast" else torch.empty(numel, dtype=given.dtype)
    # On the CPU every algorithm gives the same bits, so the choice is its own.
    numerics = {"numerics": "same_bits"} if case.verb in REDUCTIONS else {}
    cpu_case = dataclasses.replace(case, algorithm="auto")
    call(me.comm, cpu_case, source, target, **numerics)
    return target


def ops_of(dtype: DType) -> list[str]:
    return [op.name for op in supported_ops(dtype)]
