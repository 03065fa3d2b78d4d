# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a rank waits: it stops at once, and its peers learn why."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from harness import LATE_S, Attempt, Pool, Rank, Setup, attempt

WAITS = {
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(3)),
    "large all_reduce": lambda comm: comm.all_reduce(torch.ones(500_000)),
    "chain": lambda comm: comm.all_reduce(torch.ones(50_000), algorithm="chain"),
    "barrier": lambda comm: comm.barrier(),
    "empty": lambda comm: comm.empty((4,)),
}


def wait_for_rank_2(rank: Rank, way: str) -> tuple[float, Attempt, Attempt]:
    """Ranks 0 and 1 wait for rank 2, which comes when it is told to."""
    if rank.rank == 2:
        rank.wait_for("late")
    if rank.rank == 0:
        rank.tell("waiting")
    one = attempt(WAITS[way], rank.comm)
    return time.monotonic(), one, attempt(rank.comm.barrier)


def interrupt(pool: Pool) -> float:
    """Send rank 0 a Ctrl-C in its wait; return when."""
    pool.wait_for("waiting")
    time.sleep(0.3)  # what it said is some way before the wait
    os.kill(pool.pids[0], signal.SIGINT)
    return time.monotonic()


@pytest.mark.parametrize("way", WAITS)
def test_a_rank_that_waits(fresh_pool: Callable[..., Pool], way: str) -> None:
    pool = fresh_pool(3)
    pool.start(wait_for_rank_2, way)
    sent = interrupt(pool)
    outcomes = pool.collect(ranks=(0, 1))
    pool.tell("late")
    outcomes += pool.collect(ranks=(2,))
    assert all(outcome.ok for outcome in outcomes), [outcome.describe() for outcome in outcomes]
    stopped, first, after = outcomes[0].value
    assert first.kind == "KeyboardInterrupt"
    assert stopped - sent < LATE_S
    assert after.kind.endswith("Error")
    for outcome in outcomes[1:]:
        _, *attempts = outcome.value
        for one in attempts:
            assert one.kind in ("PeerLostError", "DesyncError", "FastcollError"), one
            assert "rank 0" in one.text
            assert "interrupt" in one.text.lower()
    assert outcomes[1].value[0] - sent < LATE_S
    assert outcomes[2].value[1].seconds < LATE_S


def wait_for_work(rank: Rank) -> tuple[float, Attempt, float]:
    """Interrupted in Work.wait: the call itself goes on, and the group is whole."""
    if rank.rank == 1:
        rank.wait_for("late")
    else:
        rank.tell("waiting")
    tensor = torch.ones(3)
    work = rank.comm.all_reduce(tensor, async_op=True)
    one = attempt(work.wait)
    stopped = time.monotonic()
    if rank.rank == 0:
        rank.tell("late")
    work.wait()
    rank.comm.all_reduce(tensor)
    return stopped, one, tensor[0].item()


def test_a_rank_that_waits_for_a_work(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2)
    pool.start(wait_for_work)
    sent = interrupt(pool)
    first, second = pool.finish()
    assert first[1].kind == "KeyboardInterrupt"
    assert first[0] - sent < LATE_S
    assert second[1].kind == ""
    assert first[2] == second[2] == 4.0


def wait_in_init(rank: Rank) -> tuple[float, Attempt]:
    import fastcoll

    if rank.rank == 1:
        return time.monotonic(), attempt(rank.wait_for, "late")
    rank.tell("waiting")
    store = dist.PrefixStore("init", rank.store)
    one = attempt(fastcoll.init, store=store, rank=0, world_size=2, timeout_s=20)
    return time.monotonic(), one


def test_a_rank_that_waits_in_init(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2, Setup(init=False))
    pool.start(wait_in_init)
    sent = interrupt(pool)
    (outcome,) = pool.collect(ranks=(0,))
    pool.tell("late")
    pool.collect(ranks=(1,))
    stopped, one = outcome.value
    assert one.kind == "KeyboardInterrupt"
    assert stopped - sent < LATE_S


def handled(rank: Rank) -> tuple[int, list[float]]:
    """A signal with a handler that does not raise interrupts nothing."""
    seen = []
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    rank.comm.barrier()
    if rank.rank == 1:
        rank.wait_for("late")
    else:
        rank.tell("waiting")
    tensor = torch.ones(20_000)
    rank.comm.all_reduce(tensor)
    rank.comm.all_reduce(tensor)
    return len(seen), torch.unique(tensor).tolist()


def test_other_signals_are_handled_and_the_wait_goes_on(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2)
    pool.start(handled)
    pool.wait_for("waiting")
    for _ in range(20):
        os.kill(pool.pids[0], signal.SIGUSR2)
        time.sleep(0.01)
    pool.tell("late")
    (seen, values), (_, others) = pool.finish()
    assert seen > 0
    assert values == others == [4.0]
