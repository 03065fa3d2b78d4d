# SPDX-License-Identifier: Apache-2.0
"""Several things at once: groups in turns, threads, ranks that the kernel stops and lets go on."""

import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from tests.contract.test_sequences import without_pause
from tests.support.calls import Call, mixed
from tests.support.harness import LATE_S, Attempt, Pool, Pools, Rank, Setup, attempt
from tests.support.perform import Result, Started, check
from tests.support.sites import Site, each_kind
from tests.support.waiting import wait_until, waits


def two_groups(rank: Rank, calls: list[Call], seed: int) -> list[Result]:
    """The calls of one list, on two groups in a random but common order."""
    groups = [rank.comm, rank.comm.new_group()]
    order = random.Random(seed)
    results = [Started(groups[order.randrange(2)], call).result() for call in calls]
    groups[1].close()
    return results


def test_two_groups_in_turns(pools: Pools) -> None:
    check(pools(3), mixed(3, 800, 2), 800, perform=partial(two_groups, seed=7))


def two_threads(rank: Rank, calls: list[Call]) -> list[Result]:
    """Two groups, each used by a thread of its own at the same time."""
    other = rank.comm.new_group()
    half = len(calls) // 2
    results: dict[int, list[Result]] = {}

    def work(key: int, comm: Any, mine: list[Call]) -> None:
        results[key] = [Started(comm, call).result() for call in mine]

    thread = threading.Thread(target=work, args=(1, other, calls[half:]))
    thread.start()
    work(0, rank.comm, calls[:half])
    thread.join()
    other.close()
    return results[0] + results[1]


def test_two_groups_at_the_same_time(pools: Pools) -> None:
    check(pools(2), mixed(2, 1000, 3), 1000, perform=two_threads)


def shared_group(rank: Rank, rounds: int) -> list[float]:
    """Threads that share one group: their calls pair up as they come, none is torn."""
    totals: list[float] = []

    def work() -> None:
        for _ in range(rounds):
            tensor = torch.ones(700)
            rank.comm.all_reduce(tensor)
            totals.append(tensor.sum().item())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return totals


def test_threads_that_share_a_group(pools: Pools) -> None:
    assert pools(2).run(shared_group, 300) == [[1400.0] * 900] * 2


def receive_into(outcomes: list[Attempt]) -> None:
    outcomes.append(attempt(fastcoll.recv, torch.zeros(3), 1))


def leave_beside_a_receive(rank: Rank, rounds: int) -> list[tuple[bool, str]]:
    """Whether the default group is there as long as a thread receives in it, and the outcome."""
    seen = []
    gc.collect()
    gc.freeze()  # what is made from here on is soon collected
    for number in range(rounds):
        store = dist.PrefixStore(f"round {number}", rank.store)
        group = weakref.ref(fastcoll.init(store=store, rank=rank.rank, world_size=2))
        outcomes: list[Attempt] = []
        if rank.rank == 0:
            thread = threading.Thread(target=receive_into, args=(outcomes,))
            num_held = sys.getrefcount(group())
            thread.start()
            wait_until(lambda: sys.getrefcount(group()) > num_held)  # noqa: B023
            fastcoll.destroy()
            gc.collect()
            is_there = group() is not None or outcomes != []
            thread.join()
            seen.append((is_there, outcomes[0].kind))
            rank.tell(f"left {number}")
        rank.wait_for(f"left {number}")
        fastcoll.destroy()
    return seen


def test_a_group_that_is_closed_beside_a_receive(fresh_pool: Callable[..., Pool]) -> None:
    found = fresh_pool(2, Setup(init=False)).run(leave_beside_a_receive, 8)
    assert found == [[(True, "UsageError")] * 8, []]


def leave_beside_a_call(rank: Rank) -> tuple[list[float], str]:
    """Rank 0 leaves a group in whose call another thread of it waits; the others come then."""
    group, tensor = rank.comm.new_group(), torch.ones(3)
    group.all_reduce(tensor)
    calls: list[Attempt] = []
    thread = threading.Thread(target=lambda: calls.append(attempt(group.all_reduce, tensor)))
    number = rank.store.add(f"leave/{rank.rank}", 1)
    if rank.rank == 0:
        thread.start()
        wait_until(lambda: waits(os.getpid()))
        rank.tell(f"rank 0 leaves {number}")
        group.close()
    else:
        rank.wait_for(f"rank 0 leaves {number}")
        time.sleep(0.5)  # without it a group that does not wait could pass
        thread.start()
    thread.join()
    if rank.rank:
        group.close()
    return tensor.tolist(), calls[0].text


@each_kind
def test_a_group_that_is_closed_beside_a_call(site: Site) -> None:
    assert site.run(leave_beside_a_call) == [([float(site.world**2)] * 3, "")] * site.world


FAR = 300  # steps; in a wait that only now and then lets others run they take 18 s


def let_others_run(rank: Rank) -> float:
    """How long rank 0 waits until another thread of it has come far; only then rank 1 comes."""
    steps = 0

    def count() -> None:
        nonlocal steps
        while steps < FAR:
            time.sleep(0.001)
            steps += 1
        rank.tell("another thread came far")

    if rank.rank == 1:
        rank.wait_for("another thread came far")
        rank.comm.all_reduce(torch.ones(2))
        return 0.0
    start = time.monotonic()
    thread = threading.Thread(target=count)
    thread.start()
    rank.comm.all_reduce(torch.ones(2))
    thread.join()
    return time.monotonic() - start


def test_a_wait_holds_no_lock_of_python(pools: Pools) -> None:
    assert pools(2).run(let_others_run)[0] < LATE_S


def disturb(pool: Pool, stop: threading.Event, longest_s: float) -> Callable[[], int]:
    """Stop and continue ranks at random from a thread; a function that ends it and counts."""
    count = 0

    def work() -> None:
        nonlocal count
        rng = random.Random(5)
        while not stop.is_set():
            pid = rng.choice(pool.pids)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(rng.random() * longest_s)
            os.kill(pid, signal.SIGCONT)
            time.sleep(rng.random() * 0.01)
            count += 1

    thread = threading.Thread(target=work)
    thread.start()

    def end() -> int:
        stop.set()
        thread.join()
        return count

    return end


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_are_stopped_and_continued(pools: Pools, world: int) -> None:
    pool = pools(world)
    end = disturb(pool, threading.Event(), 0.03)
    try:
        check(pool, mixed(world, 1500, 4))
        assert pool.run(without_pause, 4000, 4) == [""] * world
    finally:
        stops = end()
    assert stops > 3
