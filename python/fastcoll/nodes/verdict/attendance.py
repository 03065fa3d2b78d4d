# SPDX-License-Identifier: Apache-2.0
"""The attendance at a monitored barrier over nodes: its error names the missing ranks of all nodes.

Ranks that wait see only who is missing on their own node, or which nodes are. So each rank writes
to the board that it has come, before it waits. Decides the ranks that the error of a wait names
besides. Must not know the waits.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from fastcoll.errors import CollectiveTimeout, FastcollError
from fastcoll.nodes.verdict.board import Board


class Attendance:
    """The ranks that have come to the monitored barriers of a group."""

    def __init__(self, board: Board, rank: int, world_size: int) -> None:
        self._board = board
        self._rank = rank
        self._keys = [f"monitored/{one}" for one in range(world_size)]
        self._number = 0  # of monitored barriers
        self._is_asked_for = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Come to a monitored barrier, and be in it: see `complete`."""
        self._number += 1
        self._board.say(self._keys[self._rank], str(self._number))
        self._is_asked_for = True
        try:
            yield
        finally:
            self._is_asked_for = False

    def complete(self, error: FastcollError) -> FastcollError:
        """Return a wait's error with all ranks that have not come, if it ended at its limit."""
        if not self._is_asked_for or not isinstance(error, CollectiveTimeout):
            return error
        absent = self._board.missing(self._keys, self._number) or []
        if set(absent) <= set(error.ranks):
            return error
        # The error may be that of a call before the barrier.
        text = f"{error}. Ranks {absent} of all nodes have not come to the monitored barrier"
        return CollectiveTimeout(text, sorted({*error.ranks, *absent}))
