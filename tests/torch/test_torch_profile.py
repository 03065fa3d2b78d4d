# SPDX-License-Identifier: Apache-2.0
"""What torch's profiler shows: an event for each call, as long as it, on both backends."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import COMPILE_S, on_backend
from tests.support.harness import Pool, Rank

Pools = Callable[[int], Pool]
_PAUSE_S = 0.3


def profile(calls: Callable[[], Any]) -> list[tuple[str, bool, float]]:
    """Of each event of fastcoll's: its name, whether it is asynchronous, its seconds."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as trace:
        calls()
    events = [event for event in trace.events() if event.name.startswith("fastcoll:")]
    return [(event.name, event.is_async, event.time_range.elapsed_us() / 1e6) for event in events]


def every_verb(rank: Rank) -> list[set[str]]:
    me, world, peer = rank.rank, rank.world_size, 1 - rank.rank
    one, parts = torch.ones(6), list(torch.ones(world, 6))
    whole = torch.ones(world * 6)

    def calls(is_async: bool) -> None:
        works = [
            dist.all_reduce(one, async_op=is_async),
            dist.broadcast(one, 0, async_op=is_async),
            dist.reduce(one, 0, async_op=is_async),
            dist.all_gather(parts, one, async_op=is_async),
            dist.all_gather_into_tensor(whole, one, async_op=is_async),
            dist.reduce_scatter(one, parts, async_op=is_async),
            dist.reduce_scatter_tensor(one, whole, async_op=is_async),
            dist.gather(one, parts if me == 0 else None, async_op=is_async),
            dist.scatter(one, parts if me == 0 else None, async_op=is_async),
            dist.all_to_all_single(whole, torch.ones(world * 6), async_op=is_async),
            dist.barrier(async_op=is_async),
        ]
        for work in works:
            assert (work is not None) == is_async
            if work is not None:
                work.wait()

    def transfers() -> None:
        for work in [dist.isend(one, peer), dist.irecv(torch.empty(6), peer)]:
            assert work is not None
            work.wait()

    seen = [profile(lambda: calls(False)), profile(lambda: calls(True)), profile(transfers)]
    for events, is_async in zip(seen, (False, True, True), strict=True):
        assert {event[1] for event in events} == {is_async}, events
        assert len({event[0] for event in events}) == len(events)
    return [{name for name, _, _ in events} for events in seen]


def late(rank: Rank) -> tuple[Any, ...]:
    """An event lasts until the other rank has come, and a call that is refused has one too."""

    def waits() -> None:
        if rank.rank == 1:
            rank.wait_for("begun")
            time.sleep(_PAUSE_S)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        if rank.rank == 0:
            rank.tell("begun")
        work.wait()

    def refused() -> None:
        with pytest.raises(RuntimeError, match="BAND"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)

    [(name, is_async, seconds)] = profile(waits)
    assert rank.rank == 1 or seconds >= _PAUSE_S
    return name, is_async, profile(refused)[0][0]


def check(pool: Pool) -> None:
    by_verb = {
        *("all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "reduce_scatter"),
        *("_reduce_scatter_base", "gather", "scatter", "all_to_all", "barrier"),
    }
    calls = {f"fastcoll:{name}" for name in by_verb}
    seen = pool.run(on_backend, "fastcoll", every_verb)
    assert seen == [[calls, calls, {"fastcoll:send", "fastcoll:recv"}]] * 2
    found = pool.run(on_backend, "fastcoll", late)
    assert found == [("fastcoll:all_reduce", True, "fastcoll:all_reduce")] * 2


def test_a_call_is_an_event(bare_pools: Pools) -> None:
    check(bare_pools(2))


@pytest.mark.native
@pytest.mark.timeout(2 * COMPILE_S)
def test_a_call_is_an_event_of_what_is_compiled(compiled_pools: Pools) -> None:
    check(compiled_pools(2))
