# SPDX-License-Identifier: Apache-2.0
"""Doors: ports by which ranks of other nodes see that a rank lives, or is gone.

A rank that computes has no thread to answer. So its kernel does: a port takes connections while its
process lives, and refuses them from then on. A rank sends something there only if the store is
silent: its group's verdict (fallback.py). Decides the address of a door, and what an open
connection, a refusal and no answer say. Must not know who asks (lookout.py, machines.py).
"""

import ipaddress
import json
import os
import select
import socket
import threading
import weakref
from contextlib import suppress

from fastcoll.bootstrap.blocking_calls import in_background
from fastcoll.bootstrap.identity import machine
from fastcoll.errors import FastcollError
from fastcoll.nodes.verdict.board import Board

# A host far away answers sooner. Another wait for the same rank loses no more than this.
_ANSWER_S = 0.3
# Seconds until a connection's kernel probes a silent door, and from probe to probe; their number.
# After 20 s without an answer the connection is broken.
PROBES = 5, 5, 3
# Connections that wait at a door, which its rank clears now and then. Full, it answers nothing.
_BACKLOG = 1024
_PART_BYTES = 1 << 16
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

    def tell(self, text: str) -> None:
        """Send a text to each rank that connects, in the background, until the door is closed."""

        def run() -> None:
            arrivals = select.poll()  # select() takes no descriptor from 1024 on
            with suppress(OSError, ValueError):  # closed
                while self._socket is not None:
                    arrivals.register(self._socket, select.POLLIN)
                    arrivals.poll(_ANSWER_S * 1e3)
                    with suppress(BlockingIOError):
                        _send(self._socket.accept()[0], text)

        with suppress(FastcollError):
            in_background(run)

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


def _send(connection: socket.socket, text: str) -> None:
    with suppress(OSError), connection:  # who came may have left
        connection.settimeout(_ANSWER_S)
        connection.sendall(text.encode())


def _close_inherited() -> None:
    for door in list(_doors):
        door.close_in_child()


os.register_at_fork(after_in_child=_close_inherited)


def find_place(board: Board, rank: int, own: Door) -> tuple[str, int] | None:
    """Return the address and port of a rank's door, as far as it is known; `own` is the asker's."""
    text = board.read(f"door/{rank}")
    if not text:
        return None
    address, port, is_of = json.loads(text)
    if ipaddress.ip_address(address).is_loopback and is_of != own.machine:
        return None
    return address, port


def hear(place: tuple[str, int], limit_s: float) -> str:
    """Return the text that a rank tells at its door, or "" if it tells none in time."""
    parts = []
    with suppress(OSError), socket.create_connection(place, _ANSWER_S) as connection:
        connection.settimeout(limit_s)
        while part := connection.recv(_PART_BYTES):
            parts.append(part)
        return b"".join(parts).decode(errors="replace")
    return ""


class Line:
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
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        names = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
        for name, value in zip(names, PROBES, strict=True):
            self._socket.setsockopt(socket.IPPROTO_TCP, name, value)
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
