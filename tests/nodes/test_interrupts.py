# SPDX-License-Identifier: Apache-2.0
"""Over nodes: signal handlers that call or start transfers, and threads that close at once."""

import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from fastcoll.errors import FastcollError
from fastcoll.nodes.carriers import given_up
from fastcoll.nodes.transfers.staged import Way
from tests.nodes.test_node_transfers import Clusters, FreshPool, cluster
from tests.support.harness import LATE_S, Attempt, Rank, attempt
from tests.support.interrupts import at_each_step, interrupted, within_deadline


def call_in_a_handler(rank: Rank) -> tuple[list[Attempt], float]:
    """A handler that uses the group whose call its signal interrupted is told that it can't."""
    comm, seen, tensor = rank.comm, list[Attempt](), torch.ones(3)
    other = torch.ones(2)
    uses = [
        lambda: comm.all_reduce(other),
        lambda: comm.all_reduce(other, async_op=True).wait(),
        comm.barrier,
        comm.close,
    ]

    def handle(_number: int, _frame: object) -> None:
        seen.extend(attempt(use) for use in uses)
        rank.tell("late")

    comm.all_reduce(tensor)
    if rank.rank == 0:
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    else:
        rank.wait_for("late")
    comm.all_reduce(tensor)
    comm.all_reduce(tensor)
    return seen, tensor[0].item()


def test_a_handler_that_calls(fresh_pool: FreshPool) -> None:
    (seen, first), (nothing, second) = cluster(fresh_pool, "ab").run(call_in_a_handler)
    assert [one.kind for one in seen] == ["UsageError"] * 4
    assert all("signal handler" in one.text and one.seconds < LATE_S for one in seen)
    assert nothing == []
    assert first == second == 8.0


def start_at_each_step(rank: Rank) -> None:
    """Transfers that a handler starts go the way of those that it interrupts."""
    transfers = rank.comm.new_group()._transfers

    def check(number: int) -> bool:
        transfer: Any = SimpleNamespace(sends=False, peer=1, tag=number)
        found: list[object] = []

        def find() -> None:
            found.extend((transfers._channel(transfer, 1), transfers._any_source(number)))

        has_step = interrupted(find, find, number, "fastcoll")
        assert len(set(found)) == 2
        assert found[0]._turns is found[1]._turns  # type: ignore[attr-defined]
        return has_step

    within_deadline(lambda: at_each_step(check))


def test_a_handler_that_starts_a_transfer(clusters: Clusters) -> None:
    clusters("aabb").run(start_at_each_step)


def close_while_another_thread_starts(rank: Rank) -> str:
    """A receive whose arguments were checked before the end makes its channels behind it."""
    group = rank.comm.new_group()
    transfers = cast(Any, group)._transfers
    transfer: Any = SimpleNamespace(sends=False, peer=1, tag=1)
    source, channel = transfers._any_source(1), transfers._channel(transfer, 1)

    def close_late(one: Any, tag: int) -> Any:
        transfers._any_source(tag)
        transfers._channel(SimpleNamespace(sends=False, peer=1, tag=tag), 1)
        return mock.DEFAULT

    with (
        mock.patch.object(source, "close", side_effect=lambda: close_late(source, 2)),
        mock.patch.object(channel, "close", side_effect=lambda: close_late(channel, 3)),
    ):
        return attempt(group.close).text


def test_a_transfer_that_starts_while_the_group_closes(fresh_pool: FreshPool) -> None:
    assert cluster(fresh_pool, "ab").run(close_while_another_thread_starts) == ["", ""]


def close_in_two_threads(rank: Rank) -> tuple[int, bool]:
    """Both have waited for the queued calls before one goes on."""
    group = cast(Any, rank.comm.new_group())
    both = threading.Barrier(2)
    with (
        mock.patch.object(group._queue, "join", side_effect=lambda: both.wait(LATE_S)),
        mock.patch.object(group._lanes, "close", side_effect=group._lanes.close) as closed,
    ):
        threads = [threading.Thread(target=group.close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return closed.call_count, group.closed


def test_two_threads_that_close(fresh_pool: FreshPool) -> None:
    """A second end would free MPI's communicators twice."""
    assert cluster(fresh_pool, "ab").run(close_in_two_threads) == [(1, True)] * 2


class Carrier:
    """A carrier whose transfers have ended since it was given up."""

    def __init__(self) -> None:
        self.num_regained = 0
        self.at_look: Callable[[], object] = lambda: None

    def is_over(self) -> bool:
        self.at_look()
        return True

    def abandon(self) -> None:
        pass

    def resume(self) -> None:
        self.num_regained += 1


def leave(carrier: Any) -> None:
    given_up.give_up(carrier, torch.zeros(4))
    given_up.let_go()


def test_a_handler_that_closes_a_group() -> None:
    """It comes while the connections of another closed group are looked through."""

    def check(number: int) -> bool:
        first, second = Carrier(), Carrier()
        has_step = interrupted(lambda: leave(first), lambda: leave(second), number, "given_up")
        leave(Carrier())
        assert (first.num_regained, second.num_regained) == (1, int(has_step))
        assert not given_up._given_up
        return has_step

    within_deadline(lambda: at_each_step(check))


def test_a_child_that_closes_a_group() -> None:
    """It is forked while another thread looks through such connections."""
    looks, gate = threading.Event(), threading.Event()
    one, other = Carrier(), Carrier()

    def look() -> None:
        looks.set()
        gate.wait()

    one.at_look = look
    thread = threading.Thread(target=leave, args=(one,))
    thread.start()
    looks.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            leave(other)
        finally:
            os._exit(other.num_regained)
    gate.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize("error", [FastcollError("no thread"), KeyboardInterrupt()], ids=repr)
def test_a_refused_receive_of_a_gpu_is_withdrawn(error: BaseException) -> None:
    """Its copy on the host is open in the node already: the next receive gets the message."""
    posted, local, ends = mock.Mock(), mock.Mock(ranks=[0, 1]), mock.Mock()
    local.start_checked.return_value = [posted]
    transfer: Any = mock.Mock(sends=False, peer=1, tag=2)
    with (
        mock.patch("fastcoll.nodes.transfers.staged.copy_on_host"),
        mock.patch("fastcoll.calls.work.run_in_pool", side_effect=error),
        pytest.raises(type(error)),
    ):
        Way(ends, local).start(transfer, mock.Mock())
    assert posted.withdraw.call_count == 1
