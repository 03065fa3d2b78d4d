# SPDX-License-Identifier: Apache-2.0
"""A verdict of a later call leaves the call before it a moment to end."""

import time

import pytest
from torch.distributed import HashStore

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.node_map import NodeMap
from fastcoll.errors import AbortedError
from fastcoll.nodes.verdict import watch
from fastcoll.nodes.verdict.board import Board

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

    def abort(self, reason: str) -> None:
        self.is_broken = True


def make_watch(verdict_sequence: int) -> tuple[watch.Watch, Node]:
    """Return the watch of a rank in call 5, where the other node found a verdict."""
    board, node = Board(HashStore(), "nonce"), Node()
    board.decide_verdict(AbortedError("the other node's", [1]), verdict_sequence)
    while board.verdict() is None:
        time.sleep(0.001)
    made = watch.Watch("default", 0, NodeMap(((0,), (1,)), ("a", "b")), node, board)  # type: ignore[arg-type]
    made.begin(CALL, "all_reduce")
    made.late = lambda _: AssertionError("waited to the limit")  # type: ignore
    return made, node


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_LONG_S", 0)
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0)


def test_a_call_before_the_verdict_ends_by_its_transfer() -> None:
    made, _ = make_watch(CALL + 1)
    made.wait([Transfer(5)], Deadline(5))


def test_a_call_before_the_verdict_ends_by_it_after_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "GRACE_S", 0.05)
    made, _ = make_watch(CALL + 1)
    with pytest.raises(AbortedError, match="the other node's"):
        made.wait([Transfer(10**9)], Deadline(5))


def test_a_verdict_of_this_call_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "GRACE_S", 10**9)
    made, _ = make_watch(CALL)
    with pytest.raises(AbortedError, match="the other node's"):
        made.wait([Transfer(10**9)], Deadline(5))


@pytest.mark.parametrize("later", [False, True])
def test_a_rank_that_listens_breaks_its_node_by_a_verdict_of_its_call(later: bool) -> None:
    made, node = make_watch(CALL + later)
    made.listen()
    assert node.is_broken is not later
