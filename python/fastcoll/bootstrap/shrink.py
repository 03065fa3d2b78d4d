# SPDX-License-Identifier: Apache-2.0
"""From a broken group's sockets to a smaller mesh: the survivors agree, and connect anew.

Decides the descriptors that a rank hands over when it joins: its new region, and to each higher
rank one end of a new socket. So the agreed ranks are connected, and nothing can fail afterwards. A
rank that is left out may have got these descriptors. It never maps them. Must not know the contents
of a region.
"""

import errno
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastcoll.bootstrap.agreement import Agreement, Ballot, bits, ranks_in
from fastcoll.bootstrap.mesh import SHRINK_TAG, Mesh, Packet
from fastcoll.bootstrap.os_errors import as_driver_error, no_free_descriptor
from fastcoll.errors import DesyncError, PeerLostError

_LOOK_S = 0.02  # the others' words, and ranks that are gone though a forked child keeps the socket


@dataclass(frozen=True)
class Survivors:
    """The connected ranks that go on."""

    mesh: Mesh
    ranks: list[int]  # in the group before, ascending: the new rank is the place in this list
    region_fds: list[int]  # every survivor's region, by new rank; the caller's to close


@as_driver_error("shrink()")
def shrink(
    mesh: Mesh, ballot: Ballot, create_region: Callable[[], int], limit_s: float
) -> Survivors:
    """Agree on the ranks that are left and connect them. Collective over those ranks.

    Args:
        mesh: The connections of the group that broke; they stay as they are.
        ballot: Its memory.
        create_region: Makes this rank's region.
        limit_s: How long to wait for a rank that neither comes nor is gone. The shortest counts.

    Raises:
        PeerLostError: The others went on without this rank; `ranks` holds this rank.
        DesyncError: The answer names ranks that never joined: memory is damaged.
        DriverError: This process may not open more files. The others go on without it.
    """
    room = _Room(mesh, ballot, create_region)
    try:
        ranks = ranks_in(room.agree(limit_s))
        if mesh.rank not in ranks:
            raise PeerLostError(
                f"ranks {ranks} went on without rank {mesh.rank}, which did not come "
                "to shrink() in time: it was stopped, or busy elsewhere. This process has no group "
                "any more: end it, or make a new group with fastcoll.init()",
                [mesh.rank],
            )
        if not room.has_parts_of(ranks):
            raise DesyncError(
                f"shrink(): ranks {ranks} are said to go on, some of which never joined: the "
                "group's memory is damaged. End this process, or make a new group with "
                "fastcoll.init()"
            )
        return room.survivors(ranks)
    finally:
        room.close()


class _Room:
    """The descriptors that one rank has sent to the others, and got from them, so far."""

    def __init__(self, mesh: Mesh, ballot: Ballot, create_region: Callable[[], int]) -> None:
        self._mesh = mesh
        self._ballot = ballot
        self._gone: set[int] = set()
        self._joined: set[int] = set()  # the ranks that were sent this rank's part
        self._regions = [-1] * mesh.world_size
        self._sockets = [-1] * mesh.world_size
        self._theirs = [-1] * mesh.world_size  # the ends that higher ranks get
        self._pidfds = [-1] * mesh.world_size
        try:
            for peer, fd in enumerate(mesh.pidfds):
                self._pidfds[peer] = os.dup(fd) if fd >= 0 else -1
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
        mesh, ballot = self._mesh, self._ballot
        agreement = Agreement(mesh.rank, mesh.world_size, time.monotonic(), limit_s)
        while True:
            self._join()
            now_s = time.monotonic()  # before anything is read, see Agreement.proposal
            self._gone.update(peer for peer in self._peers() if mesh.is_gone(peer))
            for peer in self._peers():
                self._read_all(peer)
            ballot.hold_parts(bits([rank for rank, fd in enumerate(self._regions) if fd >= 0]))
            proposal = agreement.proposal(ballot.parts_held(), self._gone, now_s)
            if survivors := ballot.decide_survivors(proposal):
                return survivors
            self._wait()

    def has_parts_of(self, ranks: list[int]) -> bool:
        """Return whether this rank can go on with these."""
        return ranks[-1] < self._mesh.world_size and all(self._regions[rank] >= 0 for rank in ranks)

    def survivors(self, ranks: list[int]) -> Survivors:
        """Return the mesh of some ranks, this one among them; takes it out of the room."""
        old = self._mesh
        me = ranks.index(old.rank)
        pids = [old.pids[rank] for rank in ranks]
        sockets, pidfds = self._take(self._sockets, ranks), self._take(self._pidfds, ranks)
        return Survivors(Mesh(me, sockets, pids, pidfds), ranks, self._take(self._regions, ranks))

    def close(self) -> None:
        """Close all descriptors that were not taken."""
        for fds in (self._regions, self._sockets, self._theirs, self._pidfds):
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
        ranks = range(self._mesh.world_size)
        return [peer for peer in ranks if peer != self._mesh.rank and peer not in self._gone]

    def _wait(self) -> None:
        poll = select.poll()
        for peer in self._peers():
            poll.register(self._mesh.socket_fds[peer], select.POLLIN)
        poll.poll(_LOOK_S * 1000)

    def _join(self) -> None:
        for peer in self._peers():
            if peer in self._joined:
                continue
            fds = [self._regions[self._mesh.rank]]
            fds += [self._theirs[peer]] if peer > self._mesh.rank else []
            try:
                self._mesh.send(peer, SHRINK_TAG, fds)
            except (ConnectionError, BlockingIOError):  # gone, or never reads
                pass
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                continue  # peers will take some of this user's descriptors in flight
            self._joined.add(peer)

    def _read_all(self, peer: int) -> None:
        unread, self._mesh.unread[peer] = self._mesh.unread[peer], []
        while packet := (unread.pop(0) if unread else self._mesh.receive(peer)):
            if not packet.message:
                return  # it hung up
            self._take_part(peer, packet)

    def _take_part(self, peer: int, packet: Packet) -> None:
        """Keep the descriptors of a rank that joins; drop all other packets."""
        expected = 2 if peer < self._mesh.rank else 1
        joins = packet.message == SHRINK_TAG and self._regions[peer] < 0
        if not joins or len(packet.fds) != expected:
            packet.close()
            if joins and len(packet.fds) < expected:
                raise no_free_descriptor(peer)
            return
        self._regions[peer] = packet.fds[0]
        if peer < self._mesh.rank:
            self._sockets[peer] = packet.fds[1]
