# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a rank waits: it stops at once, and its peers learn why."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from fastcoll.calls import recorder
from tests.support.harness import DEADLINE_S, LATE_S, Attempt, Pool, Rank, Setup, attempt

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
    one = attempt(WAITS[way], rank.comm)
    return time.monotonic(), one, attempt(rank.comm.barrier)


def interrupt(pool: Pool) -> float:
    """Send rank 0 a Ctrl-C; return when."""
    os.kill(pool.pids[0], signal.SIGINT)
    return time.monotonic()


def wait_until_it_waits(pid: int) -> None:
    """Until the flight recorder of a rank says that it waits in a call."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        newest = [one.operations[-1] for one in recorder.read_process(pid) if one.operations]
        if any(one.state == "waiting" for one in newest):
            return
        time.sleep(0.01)
    raise AssertionError("it never waited")


@pytest.mark.parametrize("way", WAITS)
def test_a_rank_that_waits(fresh_pool: Callable[..., Pool], way: str) -> None:
    pool = fresh_pool(3)
    pool.start(wait_for_rank_2, way)
    wait_until_it_waits(pool.pids[0])
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


class OutOfTime(Exception):
    """What a program's own handler raises."""


def raise_out_of_time(*_: object) -> None:
    raise OutOfTime


def wait_with_a_handler(rank: Rank, way: str) -> Attempt:
    """Rank 0 waits for rank 1, which comes when it is told to, and is told why rank 0 left."""
    if rank.rank == 0:
        signal.signal(signal.SIGUSR1, raise_out_of_time)
        rank.tell("waiting")
    else:
        rank.wait_for("late")
    if way == "all_reduce":
        return attempt(rank.comm.all_reduce, torch.ones(3))
    transfer = rank.comm.send if rank.rank else rank.comm.recv
    found = attempt(transfer, torch.ones(3), rank.rank ^ 1)
    return attempt(rank.comm.barrier) if rank.rank else found


@pytest.mark.parametrize("way", ["all_reduce", "recv"])
def test_a_handler_that_raises_its_own(fresh_pool: Callable[..., Pool], way: str) -> None:
    pool = fresh_pool(2)
    pool.start(wait_with_a_handler, way)
    pool.wait_for("waiting")
    if way == "all_reduce":
        wait_until_it_waits(pool.pids[0])
    else:
        time.sleep(0.3)
    os.kill(pool.pids[0], signal.SIGUSR1)
    [first] = pool.collect(ranks=(0,))
    pool.tell("late")
    [second] = pool.collect(ranks=(1,))
    assert first.value.kind == "OutOfTime", first.describe()
    assert second.value.kind == "PeerLostError", second.describe()
    assert "rank 0 was interrupted (OutOfTime)" in second.value.text


def wait_for_work(rank: Rank, numel: int, is_planned: bool) -> tuple[float, Attempt, float]:
    """Interrupted in Work.wait: the call itself goes on, and the group is whole."""
    tensor = torch.ones(numel)
    if is_planned:
        rank.comm.all_reduce(torch.ones(numel))
    if rank.rank == 1:
        rank.wait_for("late")
    work = rank.comm.all_reduce(tensor, async_op=True)

    def wait() -> None:
        if rank.rank == 0:
            rank.tell("waiting")
        work.wait()

    one = attempt(wait)
    stopped = time.monotonic()
    if rank.rank == 0:
        rank.tell("late")
    work.wait()
    rank.comm.all_reduce(tensor)
    return stopped, one, tensor[0].item()


@pytest.mark.parametrize("numel", [3, 50_000])
@pytest.mark.parametrize("is_planned", [False, True])
def test_a_rank_that_waits_for_a_work(
    fresh_pool: Callable[..., Pool], numel: int, is_planned: bool
) -> None:
    pool = fresh_pool(2)
    pool.start(wait_for_work, numel, is_planned)
    pool.wait_for("waiting")
    sent = interrupt(pool)
    first, second = pool.finish()
    assert first[1].kind == "KeyboardInterrupt"
    assert first[0] - sent < LATE_S
    assert second[1].kind == ""
    assert first[2] == second[2] == 4.0


def wait_behind_a_work(rank: Rank) -> tuple[float, Attempt, float]:
    """Interrupted before it is a call's turn: it was never made, and the group is whole."""
    tensor, other = torch.ones(3), torch.ones(3)
    rank.comm.all_reduce(tensor)
    if rank.rank == 1:
        rank.wait_for("late")
    work = rank.comm.all_reduce(tensor, async_op=True)
    one = Attempt("", "", 0.0)
    if rank.rank == 0:
        rank.tell("waiting")
        one = attempt(rank.comm.all_reduce, other)
    stopped = time.monotonic()
    if rank.rank == 0:
        rank.tell("late")
    work.wait()
    rank.comm.all_reduce(other)
    return stopped, one, tensor[0].item() + other[0].item()


def test_a_rank_that_waits_behind_a_work(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2)
    pool.start(wait_behind_a_work)
    pool.wait_for("waiting")
    time.sleep(0.1)
    sent = interrupt(pool)
    (stopped, one, first), (_, _, second) = pool.finish()
    assert one.kind == "KeyboardInterrupt"
    assert stopped - sent < LATE_S
    assert first == second == 6.0


def wait_in_init(rank: Rank) -> tuple[float, Attempt]:
    import fastcoll

    if rank.rank == 1:
        return time.monotonic(), attempt(rank.wait_for, "late")
    store = dist.PrefixStore("init", rank.store)
    one = attempt(fastcoll.init, store=store, rank=0, world_size=2, timeout_s=20)
    return time.monotonic(), one


def test_a_rank_that_waits_in_init(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2, Setup(init=False))
    pool.start(wait_in_init)
    pool.wait_for("init/fastcoll/world/2/hello/1/0")  # what rank 0 says of itself, then it waits
    sent = interrupt(pool)
    (outcome,) = pool.collect(ranks=(0,))
    pool.tell("late")
    pool.collect(ranks=(1,))
    stopped, one = outcome.value
    assert one.kind == "KeyboardInterrupt"
    assert stopped - sent < LATE_S


def call_in_a_handler(rank: Rank, waits_for: str) -> tuple[list[Attempt], float]:
    """A handler that uses the group whose call its signal interrupted is told that it can't."""
    uses = {
        "all_reduce": lambda: rank.comm.all_reduce(torch.ones(2)),
        "asynchronous": lambda: rank.comm.all_reduce(torch.ones(2), async_op=True),
        "barrier": rank.comm.barrier,
        "new_group": rank.comm.new_group,
        "close": rank.comm.close,
    }
    seen: list[Attempt] = []

    def handle(_number: int, _frame: object) -> None:
        seen.extend(attempt(use) for use in uses.values())
        rank.tell("late")

    signal.signal(signal.SIGUSR2, handle)
    rank.comm.all_reduce(torch.ones(3))
    if rank.rank == 1:
        rank.wait_for("late")
    tensor = torch.ones(3)
    if waits_for == "call":
        rank.comm.all_reduce(tensor)
    else:
        rank.comm.all_reduce(tensor, async_op=True).wait()
    rank.comm.all_reduce(tensor)
    return seen, tensor[0].item()


@pytest.mark.parametrize("waits_for", ["call", "work"])
def test_a_handler_that_calls(fresh_pool: Callable[..., Pool], waits_for: str) -> None:
    pool = fresh_pool(2)
    pool.start(call_in_a_handler, waits_for)
    wait_until_it_waits(pool.pids[0])
    os.kill(pool.pids[0], signal.SIGUSR2)
    (seen, first), (nothing, second) = pool.finish()
    assert [one.kind for one in seen] == ["UsageError"] * 5
    assert all("signal handler" in one.text and one.seconds < LATE_S for one in seen)
    assert nothing == []
    assert first == second == 4.0


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
