# SPDX-License-Identifier: Apache-2.0
"""Small calls by every algorithm show in a minute what works at all; waits end after seconds.

Sums are compared with those in float64, so that nothing of the library's own stands on both sides.
`bench/gpu/check.sh smoke` runs this first.
"""

from collections.abc import Callable

import pytest
import torch

from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks, capture
from tests.contract.test_gpu_parts import messages
from tests.gpu.test_failures import miss
from tests.gpu.work import check, exchange, numbers, on_device

Threads = Callable[[int], GpuRanks]
Fresh = Callable[[int, float], GpuRanks]

ALGORITHMS = ("auto", "one_shot", "two_shot", "ring", "chain")
NUMELS = (5, 1000, 70_001, 300_000)
worlds = pytest.mark.parametrize("world", [2, 4, 8])


def all_reduce(me: GpuRank, algorithm: str) -> list[str]:
    """Reduce into poisoned outputs; what differs from the exact sums by more than rounding."""
    parts = [[numbers(rank, numel) for rank in range(me.world_size)] for numel in NUMELS]
    sources = [row[me.rank].to(me.device) for row in parts]
    outs = [torch.full_like(source, float("nan")) for source in sources]
    me.synchronize()
    me.comm.barrier()
    for source, out in zip(sources, outs, strict=True):
        me.comm.all_reduce(source, out=out, algorithm=algorithm, numerics="fast")
    me.synchronize()
    me.comm.check()
    problems = []
    for row, out in zip(parts, outs, strict=True):
        exact = torch.stack(row).double()
        # Each of the additions rounds by half a unit of at most this sum.
        most = me.world_size * exact.abs().sum(0) * 2.0**-24
        far = (out.cpu().double() - exact.sum(0)).abs() > most
        if bool(far.logical_or(out.cpu().isnan()).any()):
            problems.append(f"rank {me.rank}: {int(far.sum())} of {out.numel()} sums are wrong")
    return problems


@worlds
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce(quick_threads: Threads, world: int, algorithm: str) -> None:
    assert quick_threads(world).run(all_reduce, algorithm) == [[]] * world


@worlds
@pytest.mark.parametrize("verb", ["reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_verb(quick_threads: Threads, world: int, verb: str) -> None:
    check(quick_threads(world), [on_device(verb, "float32", numel) for numel in (3, 30_000)])


@worlds
def test_messages(quick_threads: Threads, world: int) -> None:
    kinds = [(numel, "float32") for numel in (3, 30_000)]
    assert quick_threads(world).run(exchange, kinds, messages) == [[]] * world


def burst(me: GpuRank) -> bool:
    """Many calls in a row: the ranks' streams must not wait for each other's later kernels."""
    sources = [torch.full((numel,), me.rank + 1.0, device=me.device) for numel in (2, 50_000)]
    outs = [torch.zeros_like(sources[turn % 2]) for turn in range(200)]
    me.synchronize()
    me.comm.barrier()
    for turn, out in enumerate(outs):
        me.comm.all_reduce(sources[turn % 2], out=out)
    me.synchronize()
    me.comm.check()
    return all(bool((out == me.world_size * (me.world_size + 1) / 2).all()) for out in outs)


def graph(me: GpuRank) -> bool:
    tensor = torch.full((4096,), float(me.rank), device=me.device)
    out = torch.zeros_like(tensor)
    captured = capture(me, lambda: [me.comm.all_reduce(tensor, out=out) for _ in range(5)])
    for _ in range(10):
        captured.replay()
    me.synchronize()
    me.comm.check()
    return bool((out == sum(range(me.world_size))).all())


@worlds
@pytest.mark.parametrize("program", [burst, graph])
def test_program(quick_threads: Threads, world: int, program: Callable[..., bool]) -> None:
    assert all(quick_threads(world).run(program))


@pytest.mark.parametrize("world", [2])
def test_lost(fresh_threads: Fresh, world: int) -> None:
    """Negative control: without its peer a rank does not get a result, but an error."""
    [text, ranks, *_], _ = fresh_threads(world, 2.0).run(miss, 1)
    assert ranks == (1,), text
