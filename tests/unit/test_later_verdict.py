# SPDX-License-Identifier: Apache-2.0
"""A verdict of a later call leaves the calls and messages before it a moment to end."""

import contextlib
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch.distributed import HashStore

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.node_map import NodeMap, Seat
from fastcoll.errors import AbortedError, CollectiveTimeout, PeerLostError
from fastcoll.nodes.gpus import in_flight
from fastcoll.nodes.transfers.channels import Channel, Ends
from fastcoll.nodes.transfers.local import LocalTransfers
from fastcoll.nodes.transfers.turns import Turns
from fastcoll.nodes.verdict import board as board_module
from fastcoll.nodes.verdict import watch
from fastcoll.nodes.verdict.board import Board
from fastcoll.nodes.verdict.doors import Door

CALL = 5


class Transfer:
    """A transfer that is over after a number of questions."""

    def __init__(self, questions: int) -> None:
        self.questions = questions

    def is_completed(self) -> bool:
        self.questions -= 1
        return self.questions < 0

    def wait(self) -> None:
        pass


class Node:
    """A node's group that is well until it is broken."""

    is_broken = False

    def check(self) -> None:
        pass

    def peer_is_gone(self, peer: int) -> bool:
        return False

    def abort(self, reason: str) -> None:
        self.is_broken = True


def make_alone(node_map: NodeMap, node: Node, board: Board) -> watch.Watch:
    """Return the watch of rank 0, whose board knows no door."""
    seat, door = Seat(node_map, 0, "nonce"), Door(board, 0)
    return watch.Watch("default", seat, node, board, door)  # type: ignore[arg-type]


def make_watch(verdict_sequence: int) -> tuple[watch.Watch, Node]:
    """Return the watch of a rank in call 5, where the other node found a verdict."""
    board, node = Board(HashStore(), "nonce"), Node()
    board.decide_verdict(AbortedError("the other node's", [1]), verdict_sequence)
    while board.verdict() is None:
        time.sleep(0.001)
    made = make_alone(NodeMap(((0,), (1,)), ("a", "b"), ("a", "b")), node, board)
    made.begin(CALL, "all_reduce")
    made.late = lambda _: AssertionError("waited to the limit")  # type: ignore
    return made, node


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_LONG_S", 0)
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0)
    monkeypatch.setattr(in_flight, "_LOOK_S", 0)


@pytest.mark.parametrize("later", [False, True])
def test_a_rank_that_listens_breaks_its_node_by_a_verdict_of_its_call(later: bool) -> None:
    made, node = make_watch(CALL + later)
    made.listen()
    assert node.is_broken is not later


def test_a_lost_machine_ends_a_wait_and_breaks_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    board, node = Board(HashStore(), "nonce"), Node()
    made = make_alone(NodeMap(((0,), (1, 2), (3,)), ("a", "b", "c"), ("a", "b", "c")), node, board)
    made.begin(CALL, "all_reduce")
    with pytest.raises(CollectiveTimeout):
        made.wait([Transfer(1000)], Deadline(0.1))
    monkeypatch.setattr(made._machines, "lost_nodes", lambda: [1])
    with pytest.raises(
        PeerLostError, match=r"all_reduce #5 .* lost node 1 \(b\): ranks 1, 2"
    ) as lost:
        made.wait([Transfer(1000)], Deadline(5))
    assert [*lost.value.ranks] == [1, 2]
    made.listen()
    assert node.is_broken


def test_a_question_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ran here, for want of a thread, and that a signal or want of memory ended."""
    monkeypatch.setattr(board_module, "_run_beside", lambda task: task())
    board = Board(HashStore(), "nonce")
    board.decide_verdict(AbortedError("the test says so", [1]))
    with monkeypatch.context() as refused:
        refused.setattr(board_module, "error_from_text", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            board.verdict()
    assert isinstance(board.verdict(), AbortedError)


@pytest.mark.parametrize(("num_nodes", "blamed"), [(2, [1]), (3, [2])])
def test_a_timeout_leaves_an_earlier_calls_rank_a_moment_to_name_the_missing(
    num_nodes: int, blamed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three nodes the second one waits for the third, in the call before."""
    monkeypatch.setattr(watch, "GRACE_S", 1.5)
    board, node = Board(HashStore(), "nonce"), Node()
    ranks = tuple((rank,) for rank in range(num_nodes))
    names = ("a", "b", "c")[:num_nodes]
    made = make_alone(NodeMap(ranks, names, names), node, board)
    made.begin(CALL, "barrier")
    if num_nodes == 3:
        better = CollectiveTimeout("node 1 waited for node 2", [2])
        threading.Timer(2.25, lambda: board.decide_verdict(better, CALL - 1)).start()
    error = made.late(Deadline(0))
    assert isinstance(error, CollectiveTimeout)
    assert [*error.ranks] == blamed


# ---- each kind of wait ---------------------------------------------------------------------------


def call_over_nodes(made: watch.Watch, questions: int) -> None:
    made.wait([Transfer(questions)], Deadline(5))


def ends_of(made: watch.Watch) -> Any:
    announced = lambda *_: contextlib.nullcontext()  # noqa: E731
    waits = SimpleNamespace(announced=announced)
    seat = SimpleNamespace(rank=0)
    nobody_is_gone = contextlib.nullcontext(SimpleNamespace(are_gone=lambda _: False))
    lookout: Any = lambda: nobody_is_gone  # noqa: E731
    return Ends(seat, None, None, None, made, waits, None, lookout)  # type: ignore[arg-type]


def message_to_another_node(made: watch.Watch, questions: int) -> None:
    transfer: Any = SimpleNamespace(sends=True, tag=0)
    channel = Channel(ends_of(made), transfer, 1, Turns())
    channel._wait([Transfer(questions)], Deadline(5))


def message_in_the_node(made: watch.Watch, questions: int) -> None:
    group: Any = SimpleNamespace(check=lambda: None)
    transfers = LocalTransfers(group, lambda *_: [], [0, 1], ends_of(made))
    under_way = Transfer(questions)

    def looks_a_moment(_: float) -> bool:
        time.sleep(0.001)
        return under_way.is_completed()

    work: Any = SimpleNamespace(_wait_for=looks_a_moment)
    transfer: Any = SimpleNamespace(peer=1, sends=True, tag=0)
    transfers.waited(work, transfer, lambda _: True, None)


def call_on_gpus(made: watch.Watch, questions: int) -> None:
    calls = in_flight.CallsInFlight(made, [], lambda: False, lambda: None)
    call = in_flight.CallInFlight("all_reduce", 5, None)
    call.sequence, call.packets, call.is_issued = CALL, [], True
    call.transfers.append(Transfer(questions))
    calls._calls.append(call)
    while calls._calls:
        calls.look()
        time.sleep(0.001)


Wait = Callable[[watch.Watch, int], None]
every_wait = pytest.mark.parametrize(
    "wait", [call_over_nodes, message_to_another_node, message_in_the_node, call_on_gpus]
)


@every_wait
def test_a_wait_before_the_verdict_ends_by_its_transfer(wait: Wait) -> None:
    made, node = make_watch(CALL + 1)
    wait(made, 300)
    assert not node.is_broken


@every_wait
def test_a_wait_before_the_verdict_ends_by_it_after_a_moment(
    wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "GRACE_S", 0.05)
    made, _ = make_watch(CALL + 1)
    with pytest.raises(AbortedError, match="the other node's"):
        wait(made, 10**9)


@every_wait
def test_a_verdict_of_the_call_of_a_wait_ends_it_at_once(
    wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "GRACE_S", 10**9)
    made, _ = make_watch(CALL)
    with pytest.raises(AbortedError, match="the other node's"):
        wait(made, 10**9)
