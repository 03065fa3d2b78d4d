# SPDX-License-Identifier: Apache-2.0
"""The sockets between the ranks of a node, and the passing of descriptors over them.

Decides how descriptors travel (SCM_RIGHTS, one message per peer and exchange). Must not know
what they are for. Once the C++ group owns the sockets, the mesh only borrows them.
"""

import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.farewell import MOST_BYTES, farewell_in, say_farewell, why_gone
from fastcoll.errors import CollectiveTimeout, DesyncError

_TAG = struct.Struct("=Q")
_CREDENTIALS = struct.Struct("=iII")


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the peer's process id, 0 where it is not visible from here, and its user id."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


class Mesh:
    """A socket from this rank to every other one.

    Attributes:
        socket_fds: By rank; -1 for this one.
        pids: Process ids by rank; 0 where not visible.
    """

    def __init__(self, rank: int, world_size: int, sockets: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.pids = [0] * world_size
        self.pids[rank] = os.getpid()
        self.socket_fds = [-1] * world_size
        for peer, connection in sockets.items():
            self.pids[peer] = peer_credentials(connection)[0]
            self.socket_fds[peer] = connection.detach()

    def open_pidfds(self) -> list[int]:
        """Return a pidfd for every visible peer, else -1; the caller's to close."""
        return [-1 if peer == self.rank else _pidfd(pid) for peer, pid in enumerate(self.pids)]

    def close(self) -> None:
        """Close the sockets; only while nobody else owns them."""
        for fd in self.socket_fds:
            if fd >= 0:
                os.close(fd)
        self.socket_fds = [-1] * self.world_size

    def exchange_fds(self, fd: int, tag: int, deadline: Deadline) -> list[int]:
        """Give every rank a copy of `fd` and return everybody's, by rank. Collective.

        A rank that fails tells all others why; they raise the same.

        Args:
            fd: A descriptor; it stands in the result as it is, or is closed on an error.
            tag: What the exchange is for; must be equal on all ranks.
            deadline: When to give up.

        Raises:
            PeerLostError: A peer hung up.
            CollectiveTimeout: A peer did not send in time.
            DesyncError: A peer sent for another tag.
        """
        fds = [-1] * self.world_size
        fds[self.rank] = fd
        try:
            for peer in self._peers():
                self._send(peer, fd, tag)
            missing = set(self._peers())
            while missing:
                for peer in self._ready(missing, deadline):
                    fds[peer] = self._receive(peer, tag)
                    missing.remove(peer)
        except BaseException as error:
            say_farewell((self.socket_fds[peer] for peer in self._peers()), self.rank, error)
            for received in fds:
                if received >= 0:
                    os.close(received)
            raise
        return fds

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.world_size) if peer != self.rank]

    @contextmanager
    def _borrowed(self, peer: int) -> Iterator[socket.socket]:
        fd = self.socket_fds[peer]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=fd)
        try:
            yield connection
        except OSError as error:
            raise why_gone(fd, peer) from error
        finally:
            connection.detach()

    def _send(self, peer: int, fd: int, tag: int) -> None:
        with self._borrowed(peer) as connection:
            socket.send_fds(connection, [_TAG.pack(tag)], [fd], socket.MSG_DONTWAIT)

    def _ready(self, missing: set[int], deadline: Deadline) -> list[int]:
        poll = select.poll()
        by_fd = {self.socket_fds[peer]: peer for peer in missing}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        events = poll.poll(deadline.left_s() * 1000)
        if not events:
            raise CollectiveTimeout(
                f"rank {self.rank} waited {deadline.limit_s:g} s for descriptors from ranks "
                f"{sorted(missing)}",
                sorted(missing),
            )
        return [by_fd[fd] for fd, _ in events]

    def _receive(self, peer: int, tag: int) -> int:
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        with self._borrowed(peer) as connection:
            message, received, _, _ = socket.recv_fds(connection, MOST_BYTES, 4, flags)
        if message == _TAG.pack(tag) and len(received) == 1:
            return received[0]
        for fd in received:
            os.close(fd)
        if not message:
            raise why_gone(self.socket_fds[peer], peer)
        if reason := farewell_in(message):
            raise reason
        raise DesyncError(
            f"rank {peer} sent a descriptor for exchange {message.hex()}, rank {self.rank} is at "
            f"{_TAG.pack(tag).hex()}"
        )


def _pidfd(pid: int) -> int:
    if pid <= 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
