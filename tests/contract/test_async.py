# SPDX-License-Identifier: Apache-2.0
"""Calls with async_op=True: the handle, the order, what they share with calls that wait.

The handle, the values and the order are promised at every site; below are single nodes.
"""

import dataclasses
import functools
import gc
import random
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fastcoll
from tests.support.calls import Call
from tests.support.draw import VERBS
from tests.support.harness import DEADLINE_S, Pool, Pools, Rank, attempt
from tests.support.perform import Result, Started
from tests.support.sites import Site, each_kind, without_gpu

SMALL_AND_LARGE = [3, 50_000]  # elements; the small ones travel with the flags


def handle(rank: Rank) -> dict[str, Any]:
    comm, tensor = rank.comm, torch.full((3,), float(rank.rank))
    work = comm.all_reduce(tensor, async_op=True)
    facts = {"is a Work": isinstance(work, fastcoll.Work | dist.Work), "wait": work.wait()}
    facts["after wait"] = work.is_completed()
    facts["value"] = tensor.tolist()
    facts["again"] = work.wait()
    second = torch.ones(2)
    future = comm.all_reduce(second, async_op=True).get_future()
    values = future.wait()
    facts["future"] = [value.tolist() for value in values]
    facts["same memory"] = values[0].data_ptr() == second.data_ptr()
    facts["then"] = (
        comm.all_reduce(torch.ones(1), async_op=True)
        .get_future()
        .then(lambda done: done.value()[0].item() + 1)
        .wait()
    )
    facts["none when not asynchronous"] = comm.all_reduce(torch.ones(1)) is None
    before = [comm.all_reduce(torch.ones(size), async_op=True) for size in (1, 5000, 10)]
    facts["barrier"] = comm.barrier(async_op=True).wait()
    comm.barrier()
    facts["before the barrier"] = all(work.is_completed() for work in before)
    return facts


def check_handle(rows: list[dict[str, Any]]) -> None:
    world = len(rows)
    for facts in rows:
        assert facts == {
            "is a Work": True,
            "wait": True,
            "after wait": True,
            "value": [world * (world - 1) / 2] * 3,
            "again": True,
            "future": [[float(world)] * 2],
            "same memory": True,
            "then": world + 1.0,
            "none when not asynchronous": True,
            "barrier": True,
            "before the barrier": True,
        }


@each_kind
def test_the_handle(site: Site) -> None:
    check_handle(site.run(handle))


def test_the_handle_of_one_rank(pools: Pools) -> None:
    check_handle(pools(1).run(handle))


def late_peer(rank: Rank) -> list[Any]:
    """Rank 0 asks before rank 1 has come: not complete, and it does not wait."""
    if rank.rank == 1:
        rank.wait_for("asked")
    tensor = torch.ones(1)
    work = fastcoll.all_reduce(tensor, async_op=True)
    early = work.is_completed()
    if rank.rank == 0:
        rank.tell("asked")
    end = time.monotonic() + 10
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    return [early, work.is_completed(), tensor.item()]


def test_the_call_does_not_wait_for_the_peers(pools: Pools) -> None:
    first, second = pools(2).run(late_peer)
    assert first == [False, True, 2.0]
    assert second[1:] == [True, 2.0]


def asynchronous_calls(site: Site, count: int) -> list[Call]:
    """Calls of every verb, each kind several times: C++ queues those that Python has planned.

    The tests have one arena of symmetric memory, so no two calls may lie there.
    """
    rng, calls = random.Random(site.world), []
    kinds = tuple(kind for kind in site.limits.kinds if kind != "symmetric")
    site = dataclasses.replace(site, limits=dataclasses.replace(site.limits, kinds=kinds))
    for verb in VERBS:
        calls += rng.sample([*site.small_calls(verb), *site.large_calls(verb)], count)
    calls = rng.sample(calls * 3, 3 * len(calls))
    return [dataclasses.replace(call, seed=number) for number, call in enumerate(calls)]


def all_at_once(rank: Rank, calls: list[Call], mixing: str) -> list[Result]:
    """Start all calls, then look at the results from the last to the first."""
    own = random.Random(rank.rank)

    def asynchronous(number: int) -> bool:
        if mixing == "some of them wait, the same on each rank":
            return number % 3 != 0
        return mixing == "none waits" or own.random() < 0.5

    started = [
        Started(rank.comm, call, async_op=asynchronous(number)) for number, call in enumerate(calls)
    ]
    return [one.result() for one in started[::-1]][::-1]


@pytest.mark.parametrize(
    "mixing",
    ["none waits", "some of them wait, the same on each rank", "other ones wait on each rank"],
)
@without_gpu
def test_calls_run_in_the_order_they_were_made(site: Site, mixing: str) -> None:
    calls = asynchronous_calls(site, 4)
    perform = functools.partial(all_at_once, mixing=mixing)
    dataclasses.replace(site, perform=perform).check(calls, len(calls))


def one_after_the_other(rank: Rank, rounds: int) -> list[float]:
    """Calls that depend on each other through one tensor: the order shows in the value."""
    comm, world = rank.comm, rank.world_size
    tensor = torch.ones(1, dtype=torch.float64)
    value = 1.0
    for number in range(rounds):
        comm.all_reduce(tensor, async_op=True)
        comm.broadcast(tensor, number % world, async_op=True)
        comm.all_reduce(tensor, dist.ReduceOp.MAX)
        value *= world
        tensor.fill_(min(tensor.item(), value) + rank.rank)
        comm.broadcast(tensor, 0)
    return [tensor.item(), value]


@each_kind
def test_a_waiting_call_comes_after_those_before_it(site: Site) -> None:
    for got, want in site.run(one_after_the_other, 25):
        assert got == want


def let_go(rank: Rank) -> list[float]:
    """Nobody keeps the arguments: neither tensors nor handles."""
    outputs = []
    for number in range(20):
        out = torch.empty(50_000)
        fastcoll.all_reduce(torch.full((50_000,), float(number)), out=out, async_op=True)
        fastcoll.all_reduce(torch.full((50_000,), 7.0), async_op=True)
        outputs.append(out)
        if number % 7 == 0:
            gc.collect()
    fastcoll.barrier()
    return [out.mean().item() for out in outputs]


def test_arguments_are_kept_alive(pools: Pools) -> None:
    assert pools(2).run(let_go) == [[2.0 * number for number in range(20)]] * 2


def let_go_of_memory(rank: Rank, numel: int) -> list[bool]:
    """A tensor that nobody holds any more goes when its call is over, without another call."""
    fastcoll.all_reduce(torch.ones(numel))
    if rank.rank == 1:
        rank.wait_for(f"let go of {numel}")
    tensor = torch.ones(numel)
    alive = weakref.ref(tensor)
    fastcoll.all_reduce(tensor, async_op=True)
    del tensor
    facts = [alive() is not None]
    if rank.rank == 0:
        rank.tell(f"let go of {numel}")
    end = time.monotonic() + DEADLINE_S
    while alive() is not None and time.monotonic() < end:
        time.sleep(0.001)
    return [*facts, alive() is None]


@pytest.mark.parametrize("numel", SMALL_AND_LARGE)
def test_memory_goes_when_the_call_is_over(pools: Pools, numel: int) -> None:
    first, second = pools(2).run(let_go_of_memory, numel)
    assert first == [True, True]
    assert second[1]


def keep_the_gil(rank: Rank) -> list[bool]:
    """A thread of Python's would get nothing done: this one never gives up the interpreter."""
    tensors = [torch.ones(numel) for numel in (2, 3000, 200_000)]
    for tensor in tensors:
        fastcoll.all_reduce(tensor)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        works = [fastcoll.all_reduce(tensor, async_op=True) for tensor in tensors]
        end = time.monotonic() + DEADLINE_S
        while not all(work.is_completed() for work in works) and time.monotonic() < end:
            pass
        return [work.is_completed() for work in works]
    finally:
        sys.setswitchinterval(before)


def test_calls_get_on_while_python_is_busy(fresh_pool: Callable[..., Pool]) -> None:
    assert fresh_pool(2).run(keep_the_gil) == [[True] * 3] * 2


def many_groups(rank: Rank, count: int) -> list[float]:
    """Pending calls on many groups at once, waited for in another order."""
    groups = [rank.comm.new_group() for _ in range(count)]
    tensors = [torch.full((1000,), float(number)) for number in range(count)]
    works = [
        group.all_reduce(tensor, async_op=True)
        for group, tensor in zip(groups, tensors, strict=True)
    ]
    for work in works[::-1]:
        work.wait()
    for group in groups:
        group.close()
    return [tensor[0].item() for tensor in tensors]


def test_many_groups_at_once(pools: Pools) -> None:
    assert pools(2).run(many_groups, 12) == [[2.0 * number for number in range(12)]] * 2


def close_with_pending(rank: Rank, numel: int, count: int) -> float:
    """Closing a group completes what was queued."""
    group = rank.comm.new_group()
    group.all_reduce(torch.ones(numel))
    if rank.rank == 0:
        rank.wait_for(f"started {count} of {numel}")  # later than the others
    tensor = torch.full((numel,), 1.0)
    works = [group.all_reduce(tensor, async_op=True) for _ in range(count)]
    if rank.rank == 1:
        rank.tell(f"started {count} of {numel}")
    group.close()
    assert all(work.is_completed() for work in works)
    return tensor.mean().item()


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("numel", SMALL_AND_LARGE)
def test_closing_completes_what_was_queued(pools: Pools, numel: int, count: int) -> None:
    assert pools(2).run(close_with_pending, numel, count) == [2.0**count] * 2


def wait_for_no_time(rank: Rank, limit: Any, what: str) -> bool:
    """Rank 0 waits for what is not complete, and begins to before rank 1 comes."""
    if rank.rank == 1:
        rank.wait_for("waiting")
        time.sleep(0.1)
    if what == "call":
        work = fastcoll.all_reduce(torch.ones(2), async_op=True)
    else:
        work = (fastcoll.isend, fastcoll.irecv)[rank.rank](torch.ones(2), 1 - rank.rank)
    if rank.rank == 0:
        rank.tell("waiting")
    return bool(work.wait(limit))


@pytest.mark.parametrize("what", ["call", "transfer"])
@pytest.mark.parametrize("limit", [None, 0, -1, timedelta(seconds=-1)])
def test_no_time_is_no_limit(pools: Pools, limit: Any, what: str) -> None:
    assert pools(2).run(wait_for_no_time, limit, what) == [True, True]


def fail(rank: Rank) -> dict[str, Any]:
    wrong = attempt(fastcoll.all_reduce, torch.ones(3), out=torch.ones(2), async_op=True)
    facts: dict[str, Any] = {"at once": wrong.kind == "UsageError" and "shape" in wrong.text}
    group = fastcoll.new_group()
    if rank.rank == 0:
        work = group.all_reduce(torch.ones(3), async_op=True, timeout_s=0.5)
        later = attempt(work.wait)
        facts["later"] = later.kind, later.ranks
        facts["completed"] = work.is_completed()
        future = attempt(work.get_future().wait)
        facts["future"] = "CollectiveTimeout" in future.kind or "all_reduce" in future.text
        rank.tell("rank 0 failed")
    else:
        rank.wait_for("rank 0 failed")
    group.close()
    good = np.ones(2)
    fastcoll.all_reduce(good)
    facts["default group"] = good.tolist()
    return facts


def test_errors_come_at_once_or_from_wait(pools: Pools) -> None:
    first, second = pools(2).run(fail)
    assert first == {
        "at once": True,
        "later": ("CollectiveTimeout", (1,)),
        "completed": True,
        "future": True,
        "default group": [2.0, 2.0],
    }
    assert second == {"at once": True, "default group": [2.0, 2.0]}


def from_a_callback(rank: Rank) -> list[float]:
    """A function that is called when a call is done may call again, and wait."""

    def again(done: torch.futures.Future) -> float:
        tensor = done.value()[0]
        fastcoll.all_reduce(tensor)
        fastcoll.all_reduce(tensor, async_op=True).wait()
        return tensor.item()

    first = fastcoll.all_reduce(torch.ones(1), async_op=True).get_future().then(again)
    return [first.wait(), first.wait()]


def test_a_callback_may_call(pools: Pools) -> None:
    assert pools(2).run(from_a_callback) == [[8.0, 8.0]] * 2


QUEUED_LIMIT_S = 2.0


def limits(rank: Rank) -> list[Any]:
    """The limit of a queued call starts when it runs; Work.wait has one of its own."""
    one, other = torch.ones(3), torch.ones(3)
    kinds = []
    if rank.rank == 0:
        works = [
            fastcoll.all_reduce(one, async_op=True),
            fastcoll.all_reduce(other, async_op=True, timeout_s=QUEUED_LIMIT_S),
        ]
        early = [attempt(works[0].wait, 0.05), attempt(works[0].wait, timedelta(seconds=0.05))]
        time.sleep(QUEUED_LIMIT_S + 0.1)  # the second call has been in the queue for longer
        rank.tell("over the limit")
        late = [attempt(work.wait) for work in works]
        kinds = [found.kind for found in (*early, *late)]
    else:
        rank.wait_for("over the limit")
        fastcoll.all_reduce(one)
        fastcoll.all_reduce(other)
    return [kinds, one[0].item(), other[0].item()]


def test_limits(pools: Pools) -> None:
    first, second = pools(2).run(limits)
    assert first == [["CollectiveTimeout"] * 2 + [""] * 2, 2.0, 2.0]
    assert second == [[], 2.0, 2.0]
