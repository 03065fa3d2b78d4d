# SPDX-License-Identifier: Apache-2.0
"""torch's profiler shows an event for each call, as long as it, on both backends.

Where a group stands in for Gloo, the events have Gloo's names.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler_util import FunctionEvent

import fastcoll
from tests.support.backends import BACKENDS, COMPILE_S, TorchGroup, on_backend
from tests.support.harness import Pool, Rank, Setup
from tests.support.verb_calls import NOT_OF_GLOO, VERB_CALLS, verbs_of

Pools = Callable[[int], Pool]
_PAUSE_S = 0.3
# The name of a call's event, where it is not that of the verb.
NAMES = {
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}
TRANSFERS = "isend, irecv"
# Asynchronous calls of Python groups have such events, and all calls in place of Gloo.
IN_PYTHON = pytest.param(
    "python",
    marks=pytest.mark.skipif(
        torch.__version__ < "2.12", reason="torch 2.11 shows no event that another thread ends"
    ),
)
CALLS = [
    *((name, True) for name, call in VERB_CALLS.items() if call.in_torch and call.is_async),
    *((name, False) for name, call in VERB_CALLS.items() if call.in_torch and call.is_async),
    (TRANSFERS, False),
]


def events_of(calls: Callable[[], Any], prefix: str = "fastcoll") -> list[FunctionEvent]:
    """Return the events behind the prefix."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as trace:
        calls()
    return [event for event in trace.events() if event.name.startswith(f"{prefix}:")]


def profile(calls: Callable[[], Any], prefix: str = "fastcoll") -> list[tuple[str, bool, float]]:
    """Of each event behind the prefix: its name, whether it is asynchronous, its seconds."""
    events = events_of(calls, prefix)
    return [(event.name, event.is_async, event.time_range.elapsed_us() / 1e6) for event in events]


def every_verb(
    rank: Rank, prefix: str = "fastcoll"
) -> dict[tuple[str, bool], set[tuple[str, bool]]]:
    """Of each call, waiting and not: its events' names, and whether they are asynchronous."""
    group, seen = TorchGroup(rank.rank, rank.world_size), {}
    for name, is_async in CALLS:
        if prefix == "gloo" and name in NOT_OF_GLOO:
            continue
        call = VERB_CALLS[name]
        tensors = call.tensors(rank.world_size)

        def run() -> None:
            work = call.make(group, *tensors, **({"async_op": True} if is_async else {}))  # noqa: B023
            if work is not None:
                work.wait()

        seen[name, is_async] = {(event, of_work) for event, of_work, _ in profile(run, prefix)}
    return seen


# Each reads other tensors than it writes, or tensors of several shapes.
SHAPES = {
    "all_reduce": [[[2, 3]]],
    "all_reduce_coalesced": [[[2], [3, 1]]],
    "all_gather": [[[4]]],
    "all_gather_into_tensor": [[[4, 2]]],
    "reduce_scatter": [[[5], [5]]],
    "all_to_all_single": [[[6]]],
    "barrier": [[]],
}


def shapes(rank: Rank, prefix: str) -> dict[str, list[list[list[int]]]]:
    """Return the shapes of inputs that the events of each call show."""
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(2, 3)),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(
            [torch.ones(2), torch.ones(3, 1)]
        ),
        "all_gather": lambda: dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            torch.ones(8, 2), torch.ones(4, 2)
        ),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(5), [torch.ones(5)] * 2),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6)),
        "barrier": dist.barrier,
    }
    return {
        name: [[s for s in event.input_shapes if s] for event in events_of(call, prefix)]
        for name, call in calls.items()
    }


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
    assert pool.run(on_backend, "fastcoll", shapes, "fastcoll") == [SHAPES] * pool.world_size
    found = pool.run(on_backend, "fastcoll", late)
    assert found == [("fastcoll:all_reduce", True, "fastcoll:all_reduce")] * 2


@pytest.mark.parametrize("backend_pools", [IN_PYTHON, BACKENDS[1]], indirect=True)
def test_a_call_is_an_event(backend_pools: Pools) -> None:
    check(backend_pools(2))


# ---- torch's operators ---------------------------------------------------------------------------


def operators(rank: Rank) -> dict[str, list[str]]:
    """Of each call: the events of torch's own operators, in order."""
    group, seen = TorchGroup(rank.rank, rank.world_size), {}
    for name, call in VERB_CALLS.items():
        if call.in_torch and name not in NOT_OF_GLOO:
            tensors = call.tensors(rank.world_size)
            events = events_of(partial(_make_and_wait, call, group, tensors), "c10d:")
            seen[name] = sorted(event.name for event in events)
    return seen


def _make_and_wait(call: Any, group: TorchGroup, tensors: Any) -> None:
    work = call.make(group, *tensors)
    if work is not None:
        work.wait()


def test_the_operators_are_those_of_gloo(backend_pools: Pools, bare_pools: Pools) -> None:
    theirs = bare_pools(2).run(on_backend, "gloo", operators)
    assert backend_pools(2).run(on_backend, "fastcoll", operators, deadline_s=COMPILE_S) == theirs
    assert theirs[0]["all_reduce"] == ["c10d::allreduce_"]


def test_the_operators_over_nodes_are_those_of_gloo(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2, Setup(False, nodes="ab"))
    theirs = pool.run(on_backend, "gloo", operators)
    assert theirs[0]["all_reduce"] == ["c10d::allreduce_"]
    assert pool.run(on_backend, "fastcoll", operators) == theirs


# ---- a group that stands in for Gloo -------------------------------------------------------------

# Gloo makes an all_reduce of each of these, and its events say so.
BY_ALL_REDUCE = ("reduce_scatter_tensor", "reduce_scatter", "reduce_scatter_tensor_coalesced")


def of_a_part(rank: Rank) -> dict[str, list[str]]:
    """The events of a part of the group, behind either prefix."""
    limit = timedelta(seconds=20)
    part: Any = dist.group.WORLD.split_group([0, 1], timeout=limit, group_name="part")  # type: ignore[union-attr]
    tensor = torch.full((3,), float(rank.rank))

    def run() -> None:
        part.allreduce([tensor]).wait()

    return {prefix: [name for name, *_ in profile(run, prefix)] for prefix in ("gloo", "fastcoll")}


def in_place_of_gloo(rank: Rank, program: Callable[..., Any], *args: Any) -> Any:
    fastcoll.stand_in_for_gloo()
    return on_backend(rank, "gloo", program, *args)


@pytest.mark.long
@pytest.mark.parametrize("backend", [IN_PYTHON, BACKENDS[1]])
def test_a_stand_in_has_the_events_of_gloo(fresh_pool: Callable[..., Pool], backend: str) -> None:
    pool = fresh_pool(2, Setup(False, env={"FASTCOLL_TORCH_BACKEND": backend}))
    gloo = pool.run(on_backend, "gloo", every_verb, "gloo")
    [shapes_of_gloo, _] = pool.run(on_backend, "gloo", shapes, "gloo")
    ours = pool.run(in_place_of_gloo, every_verb, "gloo", deadline_s=COMPILE_S)
    for on_gloo, here in zip(gloo, ours, strict=True):
        for (name, is_async), events in here.items():
            theirs = on_gloo[name, is_async]
            if name in BY_ALL_REDUCE:
                assert theirs == {("gloo:all_reduce", True)}, name
                theirs = {("gloo:reduce_scatter", True)}
            assert events == theirs, name
    for found in pool.run(in_place_of_gloo, shapes, "gloo"):
        of_ours = {name: found.pop(name) for name in BY_ALL_REDUCE if name in found}
        assert found == {name: shapes_of_gloo[name] for name in found}
        assert of_ours == {"reduce_scatter": SHAPES["reduce_scatter"]}
    parts = pool.run(in_place_of_gloo, of_a_part)
    assert parts == [{"gloo": ["gloo:all_reduce"], "fastcoll": []}] * 2
