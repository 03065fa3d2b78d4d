# SPDX-License-Identifier: Apache-2.0
"""Signals while a rank waits behind a work, and handlers that call.

That Ctrl-C ends each wait stands in test_every_fault.py, and of init in
torch/test_first_call_limits.py.
"""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastcoll
from fastcoll.calls import transfer_work
from tests.support.harness import LATE_S, Attempt, Pool, Rank, attempt
from tests.support.waiting import wait_until, waits


def wait_behind_a_work(rank: Rank) -> tuple[float, Attempt, float]:
    """Interrupted before it is a call's turn: it was never made, and the group is whole."""
    tensor, other = torch.ones(3), torch.ones(3)
    rank.comm.all_reduce(tensor)
    if rank.rank == 1:
        rank.wait_for("late")
    work = rank.comm.all_reduce(tensor, async_op=True)
    one = Attempt("", "", 0.0)
    if rank.rank == 0:
        # The signal may come before the call is made.
        one = attempt(lambda: (rank.tell("waiting"), rank.comm.all_reduce(other)))
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
    os.kill(pool.pids[0], signal.SIGINT)
    sent = time.monotonic()
    (stopped, one, first), (_, _, second) = pool.finish()
    assert one.kind == "KeyboardInterrupt"
    assert stopped - sent < LATE_S
    assert first == second == 6.0


def call_in_a_handler(rank: Rank, waits_for: str) -> tuple[list[Attempt], float]:
    """A handler that uses the group whose call its signal interrupted is told that it can't."""
    uses = {
        "all_reduce": lambda: rank.comm.all_reduce(torch.ones(2)),
        "asynchronous": lambda: rank.comm.all_reduce(torch.ones(2), async_op=True),
        "barrier": rank.comm.barrier,
        "new_group": rank.comm.new_group,
        "close": rank.comm.close,
    }
    work = None
    if waits_for == "work":
        uses["work"] = lambda: work.wait() if work else rank.comm.barrier()
    seen: list[Attempt] = []

    def handle(_number: int, _frame: object) -> None:
        seen.extend(attempt(use) for use in uses.values())
        rank.tell("late")

    signal.signal(signal.SIGUSR2, handle)
    rank.comm.all_reduce(torch.ones(3))
    if rank.rank == 1:
        rank.wait_for("late")
    else:
        rank.tell("the first call is over")
    tensor = torch.ones(3)
    if waits_for == "call":
        rank.comm.all_reduce(tensor)
    else:
        work = rank.comm.all_reduce(tensor, async_op=True)
        work.wait()
    rank.comm.all_reduce(tensor)
    return seen, tensor[0].item()


@pytest.mark.parametrize("waits_for", ["call", "work"])
def test_a_handler_that_calls(fresh_pool: Callable[..., Pool], waits_for: str) -> None:
    pool = fresh_pool(2)
    pool.start(call_in_a_handler, waits_for)
    pool.wait_for("the first call is over")  # whose end the signal could meet
    wait_until(lambda: waits(pool.pids[0]))
    os.kill(pool.pids[0], signal.SIGUSR2)
    (seen, first), (nothing, second) = pool.finish()
    assert [one.kind for one in seen] == ["UsageError"] * (6 if waits_for == "work" else 5)
    assert all("signal handler" in one.text and one.seconds < LATE_S for one in seen)
    assert nothing == []
    assert first == second == 4.0


def destroy_in_a_handler(rank: Rank) -> tuple[list[str], bool, bool]:
    """It is refused, so another `destroy` has still to close that group."""
    group = fastcoll.new_group()
    seen: list[str] = []

    def handle(_number: int, _frame: object) -> None:
        seen.append(attempt(fastcoll.destroy).kind)
        rank.tell("late")

    signal.signal(signal.SIGUSR2, handle)
    group.barrier()
    if rank.rank == 1:
        rank.wait_for("late")
    else:
        rank.tell("the first call is over")
    group.barrier()
    was_closed = group.closed
    fastcoll.destroy()
    return seen, was_closed, group.closed


def test_a_handler_that_destroys(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2)
    pool.start(destroy_in_a_handler)
    pool.wait_for("the first call is over")
    wait_until(lambda: waits(pool.pids[0]))
    os.kill(pool.pids[0], signal.SIGUSR2)
    assert pool.finish() == [(["UsageError"], False, True), ([], False, True)]


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


def wait_in_a_handler(rank: Rank) -> list[float]:
    """The signal comes while received elements are copied to their places."""
    tensor, copy = torch.zeros(6), transfer_work.copy_back
    rank.comm.isend(torch.arange(3.0), 0)
    work = rank.comm.irecv(tensor[::2], 0)

    def copy_late(*arrays: Any) -> None:
        transfer_work.copy_back = copy
        os.kill(os.getpid(), signal.SIGUSR2)
        copy(*arrays)

    signal.signal(signal.SIGUSR2, lambda *_: work.wait())
    transfer_work.copy_back = copy_late
    work.wait()
    return tensor.tolist()


def test_a_handler_that_waits_for_a_strided_receive(fresh_pool: Callable[..., Pool]) -> None:
    assert fresh_pool(1).run(wait_in_a_handler) == [[0.0, 0.0, 1.0, 0.0, 2.0, 0.0]]
