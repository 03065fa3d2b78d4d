# SPDX-License-Identifier: Apache-2.0
"""Doors: ports by which ranks of other nodes see that a rank lives, or is gone.

A rank that computes has no thread to answer. So its kernel does: a port takes connections while its
process lives, and refuses them from then on. Nothing is sent there. A rank that waits long for a
rank with which it shares no connection looks at that rank's door. Decides the address of a door,
and when a refusal proves that a rank is gone. Must not know what a wait is for.

A firewall may refuse, too, or an address be another machine's. So a refusal alone proves nothing:
another door of that node must have answered, or a lane to it be broken. A host that is cut off
answers nothing, and the limit ends the wait.
"""

import ipaddress
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from fastcoll.bootstrap.blocking_calls import in_background
from fastcoll.bootstrap.identity import machine
from fastcoll.bootstrap.node_map import Seat
from fastcoll.errors import FastcollError, PeerLostError
from fastcoll.nodes.verdict.board import Board
from fastcoll.nodes.verdict.watch import Watch

# How often a wait looks whether its peer is gone. Each look costs memory; see `Carrier.has_lost`.
_LONELY_S = 1.0
# A host far away answers sooner. Another wait for the same rank loses no more than this.
_ANSWER_S = 0.3
# Connections that wait at a door, which its rank clears now and then. Full, it answers nothing.
_BACKLOG = 1024
# Addresses of no host, which are routed as any host's: they tell this host's own address.
_ANYWHERE = "192.0.2.1", "2001:db8::1"
_doors: "weakref.WeakSet[Door]" = weakref.WeakSet()


def _address_towards(host: str, port: int = 9) -> str:
    """Return the address from which this host would send there; nothing is sent."""
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    raise OSError(f"no way to {host}")


def _own_address(store_host: str) -> str:
    """Return the address of this host to which ranks of other nodes can connect.

    It is the one by which this host reaches the store. The host of the store itself may know that
    by a name for itself alone.
    """
    found = "127.0.0.1"
    for host in (store_host, *_ANYWHERE):
        with suppress(OSError):
            found = _address_towards(host) if host else found
        if not ipaddress.ip_address(found).is_loopback:
            break
    return found


class Door:
    """A rank's own door, until it leaves the group."""

    def __init__(self, board: Board, rank: int) -> None:
        """Open it in the background, as the store's host may be a name; without a thread, never."""
        self.machine = ""
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._lock = threading.RLock()  # a signal handler may close the group

        def run() -> None:
            with suppress(OSError):  # no network or no descriptor: no rank can look at this one
                self.machine = machine()
                board.say(f"door/{rank}", self._open(_own_address(board.host)))

        with suppress(FastcollError):
            in_background(run)
        _doors.add(self)

    def _open(self, address: str) -> str:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        opened = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        opened.setblocking(False)
        place = *opened.getsockname()[:2], self.machine
        with self._lock:
            if self._is_closed:
                opened.close()
            else:
                self._socket = opened
        return json.dumps(place)

    def clear(self) -> None:
        """Let go of the connections that wait at the door; the ranks that still wait come again."""
        with suppress(OSError):
            while self._socket is not None:
                self._socket.accept()[0].close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._socket is not None:
                self._socket.close()

    __del__ = close  # where a program drops its group without an end

    def close_in_child(self) -> None:
        """Close a forked child's copy, which would answer for its parent."""
        self._lock = threading.RLock()  # a thread that the child has not may hold its parent's
        self.close()


def _close_inherited() -> None:
    for door in list(_doors):
        door.close_in_child()


os.register_at_fork(after_in_child=_close_inherited)


class _Line:
    """A connection to another rank's door, kept while that is open."""

    def __init__(self, place: tuple[str, int]) -> None:
        self._place = place
        self._socket: socket.socket | None = None

    def lives(self) -> bool | None:
        """Return whether the door is open; None without an answer."""
        if self._is_open():
            return True
        self.close()
        try:
            self._socket = socket.create_connection(self._place, _ANSWER_S)
        except ConnectionRefusedError:
            return False
        except OSError:
            return None
        self._socket.setblocking(False)
        return True

    def _is_open(self) -> bool:
        if self._socket is None:
            return False
        try:
            return bool(self._socket.recv(1))
        except OSError as error:
            return isinstance(error, BlockingIOError)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


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
        self._lines: dict[int, _Line] = {}
        self._gone: set[int] = set()
        self._reachable: set[int] = set()  # nodes of which a door has answered

    def __enter__(self) -> "Lookout":
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
            text = self._board.read(f"door/{rank}")
            if not text:
                return None
            address, port, is_of = json.loads(text)
            if ipaddress.ip_address(address).is_loopback and is_of != self._door.machine:
                return None
            self._lines[rank] = _Line((address, port))
        lives = self._lines[rank].lives()
        if lives:
            self._reachable.add(self._node_map.places[rank][0])
        return lives
