# SPDX-License-Identifier: Apache-2.0
"""Machines of other nodes: a connection to each, by which a rank sees that it still answers.

A machine without power or network closes no connection, and its ranks look as if they computed.
But the kernel of a machine that lives acknowledges probes, whatever its ranks do. Decides when a
machine counts as lost. Must not know what a wait is for.

A firewall may drop what comes to a door. So a machine falls silent only after it has answered. A
rank's own end is not looked for here: a machine may go when its ranks have.
"""

import threading
import time
from contextlib import closing

from fastcoll.bootstrap.blocking_calls import in_background
from fastcoll.bootstrap.node_map import Seat
from fastcoll.errors import FastcollError
from fastcoll.nodes.verdict.board import Board
from fastcoll.nodes.verdict.doors import Door, Line, find_place

# An open connection breaks after 20 s without an answer (Line). Then the machine has this time.
SILENT_S = 25.0
_LOOK_EVERY_S = 1.0
# No silence lasts over a time in which nobody looked: the program computed, or was stopped.
_STALE_S = 5.0
# Attempts to reach a machine that has never answered.
_MOST_ATTEMPTS = 3


class Machines:
    """One rank's looks at the machines of all other nodes, in the background of its long waits."""

    def __init__(self, seat: Seat, board: Board, door: Door) -> None:
        self._node_map = seat.node_map
        self._node, self._local_rank = seat.node_map.places[seat.rank]
        self._board = board
        self._door = door
        self._lines: dict[int, Line] = {}  # to a door of each node
        self._spare: dict[int, tuple[str, int]] = {}  # another door there
        self._attempts: dict[int, int] = {}  # at nodes that have never answered
        self._unwatched: set[int] = set()
        self._answered: set[int] = set()
        self._silent_since: dict[int, float] = {}
        self._lost: set[int] = set()
        self._is_looking = threading.Event()
        self._last_look = 0.0
        self._is_closed = False

    def lost_nodes(self) -> list[int]:
        """Return the nodes whose machines no longer answer; looks again, without waiting."""
        is_time = time.monotonic() >= self._last_look + _LOOK_EVERY_S
        if is_time and not self._is_looking.is_set() and not self._is_closed:
            self._is_looking.set()
            try:
                in_background(self._look)
            except FastcollError:  # no thread for it
                self._is_looking.clear()
        return sorted(self._lost)

    def close(self) -> None:
        """Close the connections, or let the look under way do it."""
        self._is_closed = True
        if not self._is_looking.is_set():
            self._close_lines()

    def _close_lines(self) -> None:
        for line in self._lines.values():
            line.close()

    def _look(self) -> None:
        try:
            if time.monotonic() > self._last_look + _STALE_S:
                self._silent_since.clear()
            for node in range(self._node_map.num_nodes):
                if node != self._node:
                    self._look_at(node)
        finally:
            self._last_look = time.monotonic()
            if self._is_closed:
                self._close_lines()
            self._is_looking.clear()

    def _look_at(self, node: int) -> None:
        if node in self._unwatched or not self._find(node):
            return
        answer = self._lines[node].lives()
        if answer is False:  # the rank is gone; its machine may go, too
            self._unwatched.add(node)
        elif answer or (node in self._answered and self._answers_elsewhere(node)):
            self._answered.add(node)
            self._silent_since.pop(node, None)
        elif node not in self._answered:
            self._attempts[node] = attempts = self._attempts.get(node, 0) + 1
            if attempts == _MOST_ATTEMPTS:
                self._unwatched.add(node)
        else:
            now = time.monotonic()
            if now - self._silent_since.setdefault(node, now) >= SILENT_S:
                self._lost.add(node)

    def _answers_elsewhere(self, node: int) -> bool:
        """Return whether another rank's door answers: connections may have filled the first."""
        if node not in self._spare:
            return False
        with closing(Line(self._spare[node])) as line:
            return line.lives() is not None

    def _find(self, node: int) -> bool:
        """Find two doors of a node while the store answers, which may be on that machine."""
        if node not in self._lines:
            ranks = self._node_map.nodes[node]
            first, spare = (
                find_place(self._board, ranks[(self._local_rank + more) % len(ranks)], self._door)
                for more in (0, 1)
            )
            if first is None or spare is None:
                return False
            self._lines[node] = Line(first)
            if spare != first:
                self._spare[node] = spare
        return True
