# SPDX-License-Identifier: Apache-2.0
"""The way of a verdict where the store no longer answers: the rank that serves it is lost.

The other ranks of that rank's node know best which rank is lost, and the other nodes would hear it
from the store. So those ranks, the witnesses, tell their verdict at their doors. Every rank of
another node learns the doors of two of them when the group is made. Decides which ranks are
witnesses, and when their doors are asked. Must not know a verdict's reason.
"""

import threading
from collections.abc import Callable
from functools import partial

from fastcoll.bootstrap.blocking_calls import in_background
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.node_map import Seat
from fastcoll.errors import FastcollError
from fastcoll.nodes.verdict.board import Board, text_of_error
from fastcoll.nodes.verdict.doors import Door, find_place, hear

_MOST_WITNESSES = 2  # one may compute, or be lost, too
# A witness has opened its door when its group is made. Without a network it never opens one.
_LEARN_S = 10.0
_PAUSES_S = 0.01, 1.0


class Fallback:
    """One rank's part: it tells a verdict if it is a witness, and asks the witnesses if not."""

    def __init__(self, seat: Seat, board: Board, door: Door) -> None:
        """Learn the witnesses' doors in the background."""
        self._seat = seat
        self._board = board
        self._door = door
        self._is_closed = threading.Event()
        self._places: dict[int, tuple[str, int]] = {}
        self._asked: set[int] = set()  # witnesses whose answers are awaited
        near = self._near_store()
        self._is_witness = seat.rank in near
        self._witnesses = [] if self._is_witness or seat.rank == seat.store_rank else near
        del self._witnesses[_MOST_WITNESSES:]
        if self._witnesses:
            _run_if_possible(self._learn)

    def _near_store(self) -> list[int]:
        """Return the ranks that share their node with the one that serves the store."""
        node_map, store_rank = self._seat.node_map, self._seat.store_rank
        if store_rank is None:
            return []
        node, _ = node_map.places[store_rank]
        return [rank for rank in node_map.nodes[node] if rank != store_rank]

    def _learn(self) -> None:
        limit, pause_s = Deadline(_LEARN_S), _PAUSES_S[0]
        while not self._is_closed.is_set() and not limit.passed():
            for rank in set(self._witnesses) - self._places.keys():
                if place := find_place(self._board, rank, self._door):
                    self._places[rank] = place
            if len(self._places) == len(self._witnesses):
                return
            self._is_closed.wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    def tell(self, verdict: FastcollError, sequence: int) -> bool:
        """Tell the verdict of a call at this rank's door; return whether anyone may come for it."""
        if self._is_witness:
            self._door.tell(f"{self._seat.nonce} {sequence} {text_of_error(verdict)}")
        return self._is_witness

    def ask(self) -> None:
        """Ask the witnesses for a verdict, which goes to the board, without waiting for it."""
        for rank, place in list(self._places.items()):
            if rank not in self._asked:
                self._asked.add(rank)
                if not _run_if_possible(partial(self._ask, rank, place)):
                    self._asked.discard(rank)

    def _ask(self, rank: int, place: tuple[str, int]) -> None:
        try:
            nonce, _, verdict = hear(place, Board.ANSWER_S).partition(" ")
            if nonce == self._seat.nonce:  # the port may be another program's by now
                self._board.take_verdict(verdict)
        finally:
            self._asked.discard(rank)

    def close(self) -> None:
        """Learn no door any more."""
        self._is_closed.set()


def _run_if_possible(task: Callable[[], object]) -> bool:
    try:
        in_background(task)
    except FastcollError:  # there is no thread for it
        return False
    return True
