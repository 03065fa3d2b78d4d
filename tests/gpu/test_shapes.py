# SPDX-License-Identifier: Apache-2.0
"""Calls of measurements: collectives in other shapes, signals and packs between two ranks."""

from collections.abc import Callable

import pytest
import torch
from shapes import AllReduce, copying, there_and_back

from fastcoll.errors import DesyncError, UsageError
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks, capture

Threads = Callable[[int], GpuRanks]
Fresh = Callable[[int, float], GpuRanks]
NUMEL = 200_003


def sums(me: GpuRank) -> list[str]:
    """By tiles and grids that no plan would have, and floors between them, also in a graph."""
    source = torch.full((NUMEL,), me.rank + 1.0, device=me.device)
    out = torch.empty_like(source)
    wanted = torch.full_like(source, sum(range(me.world_size + 1)))
    shapes = [(1, 512, 8 << 10), (2, 32, 16), (2, 512, 4 << 10)]
    problems = []
    for algorithm in ("one_shot", "two_shot", "chain"):
        call = AllReduce(me, source, out, algorithm)
        small = AllReduce(me, source[:500], out[:500])
        bodies = [body for shape in shapes for body in (call.launched(shape), small.floor())]
        graph = capture(me, lambda bodies=bodies: [body() for body in bodies])
        for index, run in enumerate((*bodies, graph.replay)):
            out.fill_(float("nan"))
            if index % 2:  # a floor, which has no result, behind a call that has
                bodies[0]()
            run()
            me.synchronize()
            me.comm.check()
            me.comm.barrier()
            if not torch.equal(out, wanted):
                problems.append(f"rank {me.rank}: {algorithm}, {index}")
            me.comm.barrier()  # to look asks for memory, too
    return problems


@pytest.mark.parametrize("world", [2, 4])
def test_any_shape_that_fits_computes_the_same(threads: Threads, world: int) -> None:
    problems = [text for texts in threads(world).run(sums) for text in texts]
    assert not problems, "\n".join(problems[:8])


def refused(me: GpuRank) -> str:
    tensor = torch.ones(64, device=me.device)
    with pytest.raises(UsageError, match="are no shape for all_reduce") as caught:
        AllReduce(me, tensor, tensor, "two_shot").launched((1, 512, 1 << 20))()
    return str(caught.value)


def test_a_shape_without_room_is_refused_before_it_is_started(threads: Threads) -> None:
    for text in threads(2).run(refused):
        assert "tiles of 1048576 bytes" in text


def different(me: GpuRank) -> str:
    tensor = torch.ones(64, device=me.device)
    me.synchronize()
    me.comm.barrier()
    AllReduce(me, tensor, tensor, "two_shot").launched((1, 512, 64 << me.rank))()
    me.synchronize()
    with pytest.raises(DesyncError) as caught:
        me.comm.check()
    return str(caught.value)


def test_ranks_that_ask_for_different_shapes_are_told(fresh_threads: Fresh) -> None:
    assert all(fresh_threads(2, 10.0).run(different))


def there(me: GpuRank) -> list[float]:
    """Nanoseconds of one way, twice by each step: another token each time."""
    tokens = (1 << 40, 1 << 41)
    return [there_and_back(me, s, 100, token) for s in ("signal", "ll_pack") for token in tokens]


def test_words_and_packs_go_to_and_fro(threads: Threads) -> None:
    for ways in threads(2).run(there):
        assert len(ways) == 4
        assert min(ways) > 0


def copied(me: GpuRank, step: str) -> bool:
    """Whether a rank finds what was to be copied; by some blocks, the last one not full."""
    symmetric = me.comm.empty(NUMEL, dtype=torch.uint8, device=me.device)
    pattern = (torch.arange(NUMEL, device=me.device) % 251).to(torch.uint8)
    local = torch.zeros_like(pattern)
    source, target = (local, symmetric) if step == "put" else (symmetric, local)
    source.copy_(pattern)
    target.zero_()
    me.synchronize()
    me.comm.barrier()
    if me.rank == 0:
        copying(me, step, local, symmetric, 3)()
    me.synchronize()
    me.comm.barrier()
    return torch.equal(target, pattern)


def test_packs_are_copied_between_regions(threads: Threads) -> None:
    assert threads(2).run(copied, "put") == [False, True]
    assert threads(2).run(copied, "get") == [True, False]
