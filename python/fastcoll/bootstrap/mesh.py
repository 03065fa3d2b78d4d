# SPDX-License-Identifier: Apache-2.0
"""The sockets between the ranks of a node, and the passing of descriptors over them.

Decides how descriptors travel (SCM_RIGHTS, one message per peer and exchange), and how a peer's end
shows. Must not know the use of the descriptors. Once the C++ group owns the sockets, the mesh only
borrows them.

Shared memory has no name, so its descriptors travel here, over an abstract Unix socket. A peer must
show a random token and the same user. The sockets stay open, so the kernel tells at once when a
peer is gone. A pidfd tells whether its process ended. From Linux 6.5 on the socket itself gives
one.
"""

import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.farewell import MOST_BYTES, farewell_in, say_farewell
from fastcoll.bootstrap.os_errors import as_driver_error, no_free_descriptor
from fastcoll.errors import CollectiveTimeout, DesyncError, PeerLostError

_TAG = struct.Struct("=Q")
_CREDENTIALS = struct.Struct("=iII")
_SO_PEERPIDFD = 77  # of <asm-generic/socket.h>
_RETRY_S = 0.002  # until peers have taken some of the descriptors that are in flight


# The message with which a rank joins in bootstrap/shrink.py.
SHRINK_TAG = b"shrink\0\1"


@dataclass(frozen=True)
class Packet:
    """A message and the descriptors that came with it."""

    message: bytes
    fds: list[int]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the peer's process id, 0 where it is not visible from here, and its user id."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


class Mesh:
    """A socket from this rank to every other one."""

    def __init__(
        self, rank: int, socket_fds: Sequence[int], pids: Sequence[int], pidfds: Sequence[int]
    ) -> None:
        self.rank = rank
        self.world_size = len(socket_fds)
        self.socket_fds = list(socket_fds)  # by rank; -1 for this one
        self.pids = list(pids)  # process ids by rank; 0 where not visible
        self.pidfds = list(pidfds)  # by rank; -1 for this one and where there is none
        # By rank, messages of `bootstrap.shrink` from a peer that ends the group. They came while
        # this rank waited for another message.
        self.unread: list[list[Packet]] = [[] for _ in socket_fds]

    @classmethod
    def of_sockets(cls, rank: int, world_size: int, sockets: dict[int, socket.socket]) -> "Mesh":
        """Make a mesh of a connection to every peer, which it takes over."""
        pids, pidfds = [0] * world_size, [-1] * world_size
        pids[rank] = os.getpid()
        for peer, connection in sockets.items():
            pids[peer], _ = peer_credentials(connection)
            pidfds[peer] = _pidfd(connection, pids[peer])
        fds = [sockets[peer].detach() if peer in sockets else -1 for peer in range(world_size)]
        return cls(rank, fds, pids, pidfds)

    def close(self) -> None:
        """Close the descriptors; only while nothing else owns them."""
        for fd in (*self.socket_fds, *self.pidfds):
            if fd >= 0:
                os.close(fd)
        self.socket_fds = self.pidfds = [-1] * self.world_size

    def is_gone(self, peer: int) -> bool:
        """Return whether a peer's process ended or left the group; its messages may be unread."""
        gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR
        poll = select.poll()
        poll.register(self.socket_fds[peer], select.POLLRDHUP)
        if self.pidfds[peer] >= 0:
            poll.register(self.pidfds[peer], select.POLLIN)
        return any(
            events & (gone if fd == self.socket_fds[peer] else select.POLLIN)
            for fd, events in poll.poll(0)
        )

    def send(self, peer: int, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message, with descriptors, without waiting.

        Raises:
            OSError: The peer is gone, or reads nothing for long.
        """
        with self._connection(peer) as connection:
            flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            socket.send_fds(connection, [message], list(fds), flags)

    def receive(self, peer: int) -> Packet | None:
        """Return the next message of a peer; an empty one if it hung up, None if there is none.

        The caller owns its descriptors.
        """
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        with self._connection(peer) as connection:
            while True:
                try:
                    message, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, 4, flags)
                except BlockingIOError:
                    return None
                except ConnectionResetError:  # raised once, before the messages in the queue
                    continue
                return Packet(message, fds)

    @as_driver_error("exchanging descriptors")
    def exchange_fds(self, make: Callable[[], int], tag: int, deadline: Deadline) -> list[int]:
        """Give every rank a copy of a descriptor and return those of all, by rank. Collective.

        A rank that fails tells all others why; they raise the same.

        Args:
            make: Makes the descriptor; it stands in the result as it is, or is closed on an error.
            tag: The number of this exchange; must be equal on all ranks.
            deadline: When to give up.

        Raises:
            PeerLostError: A peer hung up.
            CollectiveTimeout: A peer did not send in time.
            DesyncError: A peer sent for another tag.
            DriverError: The operating system refused a descriptor, or a peer did.
        """
        fds = [-1] * self.world_size
        try:
            fd = fds[self.rank] = make()
            unsent, missing = self._peers(), set(self._peers())
            while unsent or missing:
                unsent = [peer for peer in unsent if not self._send(peer, fd, tag)]
                for peer in self._ready(missing, unsent, deadline):
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
    def _connection(self, peer: int) -> Iterator[socket.socket]:
        fd = self.socket_fds[peer]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=fd)
        try:
            yield connection
        finally:
            connection.detach()

    def _send(self, peer: int, fd: int, tag: int) -> bool:
        """Send a descriptor; return False if this user has too many in flight for the moment."""
        try:
            self.send(peer, _TAG.pack(tag), [fd])
            return True
        except OSError as error:
            if error.errno in (errno.ETOOMANYREFS, errno.EAGAIN):
                return False
            while (packet := self.receive(peer)) and packet.message:
                self._require_usual(peer, packet)
            raise PeerLostError(f"rank {peer} hung up", [peer]) from error

    def _ready(self, missing: set[int], unsent: list[int], deadline: Deadline) -> list[int]:
        """Return peers with descriptors to read; empty if unsent ones are to be tried again."""
        if not missing and not unsent:
            return []
        poll = select.poll()
        by_fd = {self.socket_fds[peer]: peer for peer in missing}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        if unsent:
            events = poll.poll(min(deadline.left_s(), _RETRY_S) * 1000)
        else:
            events = deadline.wait(lambda wait_s: poll.poll(wait_s * 1000))
        if not events and deadline.passed():
            late = sorted(missing | set(unsent))
            stopped = [pid for peer in late if is_stopped(pid := self.pids[peer])]
            raise CollectiveTimeout(
                f"rank {self.rank} waited {deadline.limit_s:g} s to exchange descriptors with "
                f"ranks {late}" + "".join(f"; process {pid} is stopped" for pid in stopped),
                late,
            )
        return [by_fd[fd] for fd, _ in events]

    def _receive(self, peer: int, tag: int) -> int:
        packet = self.receive(peer)
        if packet is None or not packet.message:
            raise PeerLostError(f"rank {peer} hung up", [peer])
        if packet.message == _TAG.pack(tag) and len(packet.fds) == 1:
            return packet.fds[0]
        self._require_usual(peer, packet)
        if packet.message == _TAG.pack(tag):
            raise no_free_descriptor(peer)
        raise DesyncError(
            f"rank {peer} sent a descriptor for exchange {packet.message.hex()}, rank {self.rank} "
            f"is at {_TAG.pack(tag).hex()}"
        )

    def _require_usual(self, peer: int, packet: Packet) -> None:
        """Raise the reason for which a peer gave up the group's step, if the packet is one."""
        if packet.message == SHRINK_TAG:
            self.unread[peer].append(packet)
            raise PeerLostError(f"rank {peer} left this call for shrink()", [peer])
        packet.close()
        if reason := farewell_in(packet.message):
            raise reason


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped; False also where that can't be seen."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"


def _pidfd(connection: socket.socket, pid: int) -> int:
    """Return a descriptor of the process at the other end, -1 where none can be had."""
    try:  # of Linux 6.5: also of a process that is not visible, and never of a later one
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1
