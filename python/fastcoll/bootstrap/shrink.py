# SPDX-License-Identifier: Apache-2.0
"""From a broken group's sockets to a smaller mesh: the survivors agree, and connect anew.

Decides how the agreement's messages travel, and what a rank hands over when it joins: its new
region, and to each higher rank one end of a new socket. So whoever is agreed on is connected, and
nothing can go wrong after the decision. A rank that is left out may have got these descriptors,
unread; it never maps them. Must not know what a region holds.
"""

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastcoll.bootstrap.agreement import Agreement, Kind, Message, ranks_in
from fastcoll.bootstrap.mesh import SHRINK_TAG, Mesh, Packet
from fastcoll.errors import PeerLostError

_FRAME = struct.Struct(f"={len(SHRINK_TAG)}sIIQQ")  # tag, kind, round, ranks, time_ms
_LOOK_S = 0.02  # a peer whose forked child keeps its socket open is only seen to be gone by looking


@dataclass(frozen=True)
class Survivors:
    """The connected ranks that go on.

    Attributes:
        ranks: Their ranks in the group before, ascending: the new rank is the place in this list.
        region_fds: Every survivor's region, by new rank; the caller's to close.
    """

    mesh: Mesh
    ranks: list[int]
    region_fds: list[int]


def shrink(mesh: Mesh, create_region: Callable[[], int], limit_s: float) -> Survivors:
    """Agree on who is left and connect them. Collective over the ranks that are left.

    Args:
        mesh: The connections of the group that broke; they stay as they are.
        create_region: Makes this rank's region.
        limit_s: How long to wait for a rank that neither comes nor is gone. The shortest counts.

    Raises:
        PeerLostError: The others went on without this rank; `ranks` holds this rank.
    """
    room = _Room(mesh, create_region)
    try:
        ranks = ranks_in(room.agree(limit_s))
        if not room.has_parts_of(ranks):
            raise PeerLostError(
                f"ranks {ranks} went on without rank {mesh.rank}, which did not come "
                "to shrink() in time: it was stopped, or busy elsewhere. This process has no group "
                "any more: end it, or make a new group with fastcoll.init()",
                [mesh.rank],
            )
        return room.survivors(ranks)
    finally:
        room.close()


class _Room:
    """Where one rank meets the others: what it has sent and got so far."""

    def __init__(self, mesh: Mesh, create_region: Callable[[], int]) -> None:
        self._mesh = mesh
        self._gone = {mesh.rank}
        self._regions = [-1] * mesh.world_size
        self._sockets = [-1] * mesh.world_size
        self._theirs = [-1] * mesh.world_size  # the ends that higher ranks get
        try:
            self._regions[mesh.rank] = create_region()
            for peer in range(mesh.rank + 1, mesh.world_size):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours.setblocking(False)
                theirs.setblocking(False)
                self._sockets[peer], self._theirs[peer] = ours.detach(), theirs.detach()
        except BaseException:
            self.close()
            raise

    def agree(self, limit_s: float) -> int:
        """Return the ranks that go on, as bits."""
        mesh = self._mesh
        agreement = Agreement(mesh.rank, mesh.world_size, time.monotonic(), limit_s)
        self._send_all(agreement)
        while agreement.decision is None:
            # Before anything is read: who was stopped meanwhile first reads what was sent to it.
            now_s = time.monotonic()
            gone = [peer for peer in self._peers() if mesh.is_gone(peer)]
            for peer in self._peers():
                self._read_all(agreement, peer, now_s)
            for peer in gone:
                self._gone.add(peer)
                agreement.lose(peer, now_s)
            agreement.tick(now_s)
            self._send_all(agreement)
            if agreement.decision is None:
                self._wait()
        return agreement.decision

    def has_parts_of(self, ranks: list[int]) -> bool:
        """Return whether this rank is one of them and can go on with them."""
        return self._mesh.rank in ranks and all(self._regions[rank] >= 0 for rank in ranks)

    def survivors(self, ranks: list[int]) -> Survivors:
        """Return the mesh of some ranks, this one among them; takes it out of the room."""
        old = self._mesh
        me = ranks.index(old.rank)
        pidfds = [old.pidfds[rank] for rank in ranks]
        pidfds = [os.dup(fd) if fd >= 0 else -1 for fd in pidfds]
        sockets, regions = self._take(self._sockets, ranks), self._take(self._regions, ranks)
        return Survivors(
            Mesh(me, sockets, [old.pids[rank] for rank in ranks], pidfds), ranks, regions
        )

    def close(self) -> None:
        """Close what was not taken."""
        for fds in (self._regions, self._sockets, self._theirs):
            for rank, fd in enumerate(fds):
                if fd >= 0:
                    os.close(fd)
                    fds[rank] = -1

    @staticmethod
    def _take(fds: list[int], ranks: list[int]) -> list[int]:
        taken = [fds[rank] for rank in ranks]
        for rank in ranks:
            fds[rank] = -1
        return taken

    def _peers(self) -> list[int]:
        return [peer for peer in range(self._mesh.world_size) if peer not in self._gone]

    def _wait(self) -> None:
        poll = select.poll()
        for peer in self._peers():
            poll.register(self._mesh.socket_fds[peer], select.POLLIN)
        poll.poll(_LOOK_S * 1000)

    def _send_all(self, agreement: Agreement) -> None:
        for peer, message in agreement.outbox:
            frame = _FRAME.pack(
                SHRINK_TAG, message.kind, message.round, message.ranks, message.time_ms
            )
            fds = []
            if message.kind == Kind.JOIN:
                fds = [self._regions[self._mesh.rank]]
                fds += [self._theirs[peer]] if peer > self._mesh.rank else []
            with contextlib.suppress(ConnectionError, BlockingIOError):  # gone, or never reads
                self._mesh.send(peer, frame, fds)
        agreement.outbox.clear()

    def _read_all(self, agreement: Agreement, peer: int, now_s: float) -> None:
        unread, self._mesh.unread[peer] = self._mesh.unread[peer], []
        while packet := (unread.pop(0) if unread else self._mesh.receive(peer)):
            if not packet.message:
                return  # it hung up
            message = self._understood(peer, packet)
            if message is not None:
                agreement.receive(peer, message, now_s)

    def _understood(self, peer: int, packet: Packet) -> Message | None:
        """Return a message of the agreement, its descriptors kept; what else comes is dropped."""
        message = None
        if len(packet.message) == _FRAME.size:
            tag, kind, number, ranks, time_ms = _FRAME.unpack(packet.message)
            if tag == SHRINK_TAG and kind in list(Kind):
                message = Message(Kind(kind), number, ranks, time_ms)
        joins = message is not None and message.kind == Kind.JOIN
        expected = (2 if peer < self._mesh.rank else 1) if joins else 0
        if len(packet.fds) != expected or (joins and self._regions[peer] >= 0):
            message, joins = None, False
        if not joins:
            packet.close()
            return message
        self._regions[peer] = packet.fds[0]
        if peer < self._mesh.rank:
            self._sockets[peer] = packet.fds[1]
        return message
