# SPDX-License-Identifier: Apache-2.0
"""The look of a long wait at ranks of other nodes, of which no connection may tell enough.

Decides when a rank counts as gone, by its door (doors.py), a broken lane, or what its node says.
Must not know what the wait is for.

A firewall may refuse, too, or an address be another machine's. So a refusal alone proves nothing:
another door of that node must have answered, or a lane to it be broken.
"""

import time
from collections.abc import Callable, Sequence

from fastcoll.bootstrap.node_map import Seat
from fastcoll.errors import FastcollError, PeerLostError
from fastcoll.nodes.verdict.board import Board
from fastcoll.nodes.verdict.doors import Door, Line, find_place
from fastcoll.nodes.verdict.watch import Watch

# How often a wait looks whether its peer is gone. Each look costs memory; see `Carrier.has_lost`.
_LONELY_S = 1.0


class Lookout:
    """The look of one long wait at the ranks for which it waits; ends with its context."""

    def __init__(
        self, seat: Seat, board: Board, watch: Watch, has_lost: Callable[[int], bool], door: Door
    ) -> None:
        self._node_map = seat.node_map
        self._board = board
        self._watch = watch
        self._has_lost = has_lost
        self._door = door
        self._next_look = time.monotonic() + _LONELY_S
        self._lines: dict[int, Line] = {}
        self._gone: set[int] = set()
        self._reachable: set[int] = set()  # nodes of which a door has answered

    def __enter__(self) -> "Lookout":
        # Each long wait for this rank leaves a connection there, and ends by what this rank does.
        self._door.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines.values():
            line.close()

    def are_gone(self, ranks: Sequence[int]) -> bool:
        """Return whether all of these ranks are known to be gone, if it is time to look."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LONELY_S
        self._door.clear()
        return all(rank in self._gone or self._is_gone(rank) for rank in ranks)

    def error(self, name: str, ranks: Sequence[int]) -> FastcollError:
        """Return the error of a wait for ranks that are gone, or a better-informed rank's."""
        which = f"rank {ranks[0]}: its" if len(ranks) == 1 else f"ranks {list(ranks)}: their"
        return self._watch.await_verdict() or PeerLostError(
            f"{name} lost {which} process ended or left the group", ranks
        )

    def _is_gone(self, rank: int) -> bool:
        if self._has_lost(rank) or self._board.is_gone(rank) or self._is_refused(rank):
            self._gone.add(rank)
            return True
        return False

    def _is_refused(self, rank: int) -> bool:
        if self._lives(rank) is not False:
            return False
        node, _ = self._node_map.places[rank]
        others = [other for other in self._node_map.nodes[node] if other != rank]
        return node in self._reachable or any(
            self._has_lost(other) or self._lives(other) for other in others
        )

    def _lives(self, rank: int) -> bool | None:
        if rank not in self._lines:
            place = find_place(self._board, rank, self._door)
            if place is None:
                return None
            self._lines[rank] = Line(place)
        lives = self._lines[rank].lives()
        if lives:
            self._reachable.add(self._node_map.places[rank][0])
        return lives
