# SPDX-License-Identifier: Apache-2.0
"""Machines that no longer answer: how long a silence has to last, and what is none."""

from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from fastcoll.bootstrap.node_map import NodeMap, Seat
from fastcoll.nodes.verdict import machines
from fastcoll.nodes.verdict.board import Board
from fastcoll.nodes.verdict.doors import Door
from fastcoll.nodes.verdict.machines import SILENT_S, Machines

SEAT = Seat(NodeMap(((0,), (1, 2)), ("a", "b"), ("a", "b")), 0, "nonce")
OPEN, REFUSED, NO_ANSWER = True, False, None


class Sight:
    """Rank 0's looks at the other node, whose machine answers as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.asked = 1000.0, 0  # at rank 1's door
        self.answers: dict[int, bool | None] = {1: NO_ANSWER, 2: NO_ANSWER}
        board = Board(HashStore(), "nonce")
        for rank in self.answers:
            board.say(f"door/{rank}", f'["192.0.2.7", {rank}, "b"]')
        monkeypatch.setattr(machines, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(machines, "in_background", lambda task: task())
        monkeypatch.setattr(machines, "Line", self._line)
        self._door = Door(board, 0)
        self.machines = Machines(SEAT, board, self._door)

    def _line(self, place: tuple[str, int]) -> SimpleNamespace:
        rank = place[1]

        def lives() -> bool | None:
            self.asked += rank == 1
            return self.answers[rank]

        return SimpleNamespace(lives=lives, close=lambda: None)

    def watch(self, answer: bool | None, seconds: float) -> list[int]:
        """Look each second for a while; return the nodes that are lost then."""
        self.answers[1] = answer
        for _ in range(round(seconds)):
            self.now_s += 1
            self.machines.lost_nodes()
        return self.machines.lost_nodes()


@pytest.fixture
def sight(monkeypatch: pytest.MonkeyPatch) -> Sight:
    return Sight(monkeypatch)


def test_a_machine_is_lost_when_it_is_silent_after_an_answer(sight: Sight) -> None:
    assert sight.watch(OPEN, 3) == []
    assert sight.watch(NO_ANSWER, SILENT_S) == []
    assert sight.watch(NO_ANSWER, 1) == [1]


def test_a_machine_may_go_when_its_rank_has(sight: Sight) -> None:
    sight.watch(OPEN, 3)
    sight.watch(REFUSED, 1)
    assert sight.watch(NO_ANSWER, 10 * SILENT_S) == []


@pytest.mark.parametrize("answer", [OPEN, REFUSED])
def test_a_machine_answers_at_any_door(sight: Sight, answer: bool | None) -> None:
    sight.watch(OPEN, 3)
    sight.answers[2] = answer
    assert sight.watch(NO_ANSWER, 10 * SILENT_S) == []
    sight.answers[2] = NO_ANSWER
    assert sight.watch(NO_ANSWER, SILENT_S + 2) == [1]


def test_an_answer_ends_a_silence(sight: Sight) -> None:
    sight.watch(OPEN, 1)
    for _ in range(3):
        assert sight.watch(NO_ANSWER, SILENT_S) == []
        assert sight.watch(OPEN, 1) == []


def test_a_machine_that_has_never_answered_is_not_lost(sight: Sight) -> None:
    assert sight.watch(NO_ANSWER, 10 * SILENT_S) == []
    assert sight.asked == machines._MOST_ATTEMPTS


def test_a_silence_does_not_last_while_nobody_looks(sight: Sight) -> None:
    sight.watch(OPEN, 1)
    sight.watch(NO_ANSWER, SILENT_S - 1)
    sight.now_s += 3600
    assert sight.watch(NO_ANSWER, SILENT_S) == []
    assert sight.watch(NO_ANSWER, 2) == [1]


def test_a_look_goes_on_once_a_second(sight: Sight) -> None:
    sight.watch(OPEN, 1)
    for _ in range(100):
        sight.machines.lost_nodes()
    assert sight.asked == 1
