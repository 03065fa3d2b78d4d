# SPDX-License-Identifier: Apache-2.0
"""Reductions by the switch between the GPUs: one rank on each, in threads and in processes.

Numbers are whole and small, so that no order of adding and no rounding shows: every result is
compared exactly.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import reduce

import pytest
import torch

from fastcoll.errors import UnsupportedError
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks
from fastcoll.types import TORCH_DTYPES, DType, Op, ReduceOp
from tests.support import harness
from tests.support.gpu import as_gpu_rank

FLOATS = (DType.float32, DType.float16, DType.bfloat16)
DTYPES = (*FLOATS, DType.int32, DType.uint32, DType.int64)
INTEGER_OPS = {Op.SUM: torch.add, Op.MAX: torch.maximum, Op.BXOR: torch.bitwise_xor}
# Elements: none, one, odd, a pack more or less, several segments.
NUMELS = (0, 1, 7, 1023, 65_537, 200_000)
KINDS = ("private", "symmetric", "apart", "shifted", "mixed", "in_place")
BY_SWITCH = {"algorithm": "multimem", "numerics": "fast"}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call. `kind`: where its tensors lie.

    - symmetric: at one place on all ranks
    - apart: there, but rank 1's is another tensor than the others'
    - shifted: an element from an aligned address
    - mixed: private on odd ranks
    """

    verb: str
    dtype: DType
    op: Op
    numel: int
    kind: str


def numbers(numel: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers up to 12: 16 ranks' sums of them are exact in bfloat16."""
    return ((torch.arange(numel) * (rank + 3) + rank) % 13).to(dtype)


class Tensors:
    """Room for the calls of one rank: symmetric, two of a kind, and private."""

    def __init__(self, me: GpuRank, dtype: torch.dtype, numel: int) -> None:
        self.me = me
        self.shared = [me.comm.empty(numel + 1, dtype=dtype, device=me.device) for _ in range(4)]
        self.own = [torch.empty(numel + 1, dtype=dtype, device=me.device) for _ in range(2)]

    def pair(self, kind: str, num_in: int, num_out: int) -> tuple[torch.Tensor, torch.Tensor]:
        """An input and an output."""
        rank = self.me.rank
        private = kind == "private" or (kind == "mixed" and rank % 2 == 1)
        other = 2 if kind == "apart" and rank == 1 else 0
        source, target = self.own if private else self.shared[other : other + 2]
        start = 1 if kind == "shifted" else 0
        source = source[start : start + num_in]
        if kind == "in_place":  # of a reduce_scatter: its own part
            own = rank * num_out if num_in > num_out else 0
            return source, source[own : own + num_out]
        return source, target[start : start + num_out]


def problems(me: GpuRank, tensors: Tensors, call: Call) -> list[str]:
    """Make a call and return what is wrong with its result."""
    dtype, world = TORCH_DTYPES[call.dtype], me.world_size
    scatters = call.verb == "reduce_scatter"
    num_in = call.numel * world if scatters else call.numel
    source, target = tensors.pair(call.kind, num_in, call.numel)
    target.fill_(-1)
    source.copy_(numbers(num_in, me.rank, dtype))
    op = getattr(ReduceOp, call.op.name)
    me.synchronize()
    me.comm.barrier()
    if scatters:
        me.comm.reduce_scatter_tensor(target, source, op, **BY_SWITCH)
    else:
        me.comm.all_reduce(source, op, out=target, **BY_SWITCH)
    me.synchronize()
    me.comm.check()
    exact = torch.float32 if call.dtype in FLOATS else torch.int64
    combine = INTEGER_OPS.get(call.op, torch.add)
    wanted = reduce(combine, [numbers(num_in, rank, exact) for rank in range(world)])
    if scatters:
        wanted = wanted[me.rank * call.numel : (me.rank + 1) * call.numel]
    if call.op is Op.AVG:
        wanted = wanted / world
    right = torch.equal(target.cpu(), wanted.to(dtype))
    return [] if right else [f"rank {me.rank}: wrong numbers: {call}"]


def check_all(me: GpuRank, dtype: DType) -> list[str]:
    tensors = Tensors(me, TORCH_DTYPES[dtype], max(NUMELS) * me.world_size)
    me.synchronize()
    me.comm.barrier()
    calls = [
        Call(verb, dtype, op, numel, kind)
        for verb in ("all_reduce", "reduce_scatter")
        for op in ((Op.SUM, Op.AVG) if dtype in FLOATS else INTEGER_OPS)
        for numel in NUMELS
        for kind in KINDS
    ]
    return [text for call in calls for text in problems(me, tensors, call)]


def why_not(me: GpuRank) -> str:
    me.comm.all_reduce(torch.ones(1, device=me.device))
    report = me.comm.gpu_report()
    return report[report.index("no multicast") :] if "no multicast" in report else ""


@pytest.fixture(scope="module")
def ranks() -> Iterator[GpuRanks]:
    """A rank on each GPU of this machine, whose switch can add; skips where there is no such."""
    num_gpus = min(8, torch.cuda.device_count())
    if num_gpus < 2:
        pytest.skip("not run: one GPU, and a switch adds what different GPUs hold")
    made = GpuRanks([f"cuda:{rank}" for rank in range(num_gpus)])
    try:
        if reason := made.run(why_not)[0]:
            pytest.skip(f"not run: {reason}")
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_size_and_place(ranks: GpuRanks, dtype: DType) -> None:
    found = [text for texts in ranks.run(check_all, dtype) for text in texts]
    assert not found, f"{len(found)} problems:\n" + "\n".join(found[:8])


def beside_others(me: GpuRank) -> bool:
    """The switch's calls take turns with kernels of every kind, without a wait between."""
    tensor, other = torch.empty(70_000, device=me.device), torch.ones(500, device=me.device)
    outs = [torch.empty_like(tensor) for _ in range(20)]
    tensor.fill_(me.rank)
    me.synchronize()
    me.comm.barrier()
    for turn, out in enumerate(outs):
        more = BY_SWITCH if turn % 2 else {"algorithm": ("one_shot", "two_shot")[turn // 2 % 2]}
        me.comm.all_reduce(tensor, out=out, **more)
        me.comm.broadcast(other, turn % me.world_size)
    me.synchronize()
    me.comm.check()
    return all(bool((out == sum(range(me.world_size))).all()) for out in outs)


def test_it_takes_turns_with_other_algorithms(ranks: GpuRanks) -> None:
    assert all(ranks.run(beside_others))


# ---- processes -----------------------------------------------------------------------------------


def in_process(rank: harness.Rank) -> tuple[str, list[str]]:
    me = as_gpu_rank(rank)
    if reason := why_not(me):
        return reason, []
    return "", check_all(me, DType.bfloat16)


def test_processes_share_one_object(fresh_pool: Callable[..., harness.Pool]) -> None:
    num_gpus = min(8, torch.cuda.device_count())
    if num_gpus < 2:
        pytest.skip("not run: one GPU, and a switch adds what different GPUs hold")
    results = fresh_pool(num_gpus).run(in_process, deadline_s=120)
    assert len({reason for reason, _ in results}) == 1, "the same verdict on all ranks"
    if results[0][0]:
        pytest.skip(f"not run: {results[0][0]}")
    found = [text for _, texts in results for text in texts]
    assert not found, "\n".join(found[:8])


# ---- on one GPU ----------------------------------------------------------------------------------


def in_vain(me: GpuRank) -> tuple[str, bool]:
    tensor = torch.ones(1000, device=me.device)
    text = ""
    try:
        me.comm.all_reduce(tensor, **BY_SWITCH)
    except UnsupportedError as error:
        text = str(error)
    me.comm.all_reduce(tensor, numerics="fast")
    me.synchronize()
    return text, bool((tensor == me.world_size).all())


def test_ranks_that_share_a_gpu_are_told_why_and_go_on() -> None:
    made = GpuRanks(["cuda:0"] * 2)
    try:
        for text, right in made.run(in_vain):
            assert "2 ranks share a GPU, and the switch adds what different GPUs hold" in text
            assert right
    finally:
        made.close()
