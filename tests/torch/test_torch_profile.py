# SPDX-License-Identifier: Apache-2.0
"""torch's profiler shows an event for each call, as long as it, on both backends."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import TorchGroup, on_backend
from tests.support.harness import Pool, Rank
from tests.support.verb_calls import VERB_CALLS, verbs_of

Pools = Callable[[int], Pool]
_PAUSE_S = 0.3
# Gloo's names of a call's event, where it is not that of the verb.
NAMES = {
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}
TRANSFERS = "isend, irecv"
CALLS = [
    *((name, True) for name, call in VERB_CALLS.items() if call.in_torch and call.is_async),
    *((name, False) for name, call in VERB_CALLS.items() if call.in_torch and call.is_async),
    (TRANSFERS, False),
]


def profile(calls: Callable[[], Any]) -> list[tuple[str, bool, float]]:
    """Of each event of fastcoll's: its name, whether it is asynchronous, its seconds."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as trace:
        calls()
    events = [event for event in trace.events() if event.name.startswith("fastcoll:")]
    return [(event.name, event.is_async, event.time_range.elapsed_us() / 1e6) for event in events]


def every_verb(rank: Rank) -> dict[tuple[str, bool], set[tuple[str, bool]]]:
    """Of each call, waiting and not: its events' names, and whether they are asynchronous."""
    group, seen = TorchGroup(rank.rank, rank.world_size), {}
    for name, is_async in CALLS:
        call = VERB_CALLS[name]
        tensors = call.tensors(rank.world_size)

        def run() -> None:
            work = call.make(group, *tensors, **({"async_op": True} if is_async else {}))  # noqa: B023
            if work is not None:
                work.wait()

        seen[name, is_async] = {(event, of_work) for event, of_work, _ in profile(run)}
    return seen


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
    for seen in pool.run(on_backend, "fastcoll", every_verb):
        for (name, is_async), events in seen.items():
            is_async |= name == TRANSFERS
            names = {f"fastcoll:{NAMES.get(verb, verb)}" for verb in verbs_of(name)}
            assert events == {(event, is_async) for event in names}, name
    found = pool.run(on_backend, "fastcoll", late)
    assert found == [("fastcoll:all_reduce", True, "fastcoll:all_reduce")] * 2


def test_a_call_is_an_event(backend_pools: Pools) -> None:
    check(backend_pools(2))
