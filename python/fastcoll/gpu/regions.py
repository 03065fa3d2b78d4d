# SPDX-License-Identifier: Apache-2.0
"""The ranks' regions on their GPUs: made, handed over, mapped, tried out and taken down.

Decides that all ranks take the same route: the first of which every rank has seen a write and a
read arrive on every pair. Ranks that are threads of one process share pointers where they share a
device. Must not know verbs or streams.
"""

import os
import secrets
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from fastcoll import env
from fastcoll.errors import FastcollError, UnsupportedError
from fastcoll.gpu.link import Facts, Link, problem_of, problems, try_together
from fastcoll.gpu.multicast import join_multicast
from fastcoll.gpu.terms import IPC, PROCESS, VMM, DeviceHello, Terms
from fastcoll.native import _cuda


class _Memory:
    """Memory of this process, freed when the last rank that uses it lets go."""

    def __init__(self, ptr: int, free: Callable[[], None]) -> None:
        self.ptr = ptr
        self._free = free
        self._users = 1
        self._lock = threading.Lock()

    def retain(self) -> "_Memory":
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._free()


# The memory that ranks of this process offer to each other, by a random key.
_offers: dict[str, _Memory] = {}


class Regions:
    """Every rank's region as mapped here, or another piece of memory that each of them has."""

    def __init__(
        self,
        route: str,
        hellos: Sequence[DeviceHello],
        num_bytes: int,
        link: Link,
        places: Sequence[int] = (),
    ) -> None:
        """Prepare for memory of `num_bytes`; `places`: its addresses here, in reserved ones."""
        self.route = route  # the route by which they were mapped
        self.ptrs = [0] * len(hellos)  # addresses by rank
        # Memory that the group took later, and which goes with its regions.
        self.arenas: list[Regions] = []
        self._reserved: list[tuple[int, int]] = []
        self.device = hellos[link.rank].device
        self.hellos = hellos
        self.num_bytes = num_bytes  # of each
        # The object that all of them are behind, if the group has one.
        self.multicast: _cuda.Multicast | None = None
        self.no_multicast = ""  # why it has none
        self.link = link  # the other ranks
        self._places = places or [0] * len(hellos)
        self._is_placed = bool(places)
        self._mapped: list[_Memory] = []
        self._own: _Memory | None = None
        self._fd = -1
        self._handle = b""
        self._key = secrets.token_hex(8)

    def create(self) -> None:
        """Make this rank's own region, of zeroes."""
        size, device = self.num_bytes, self.device
        if self.route == VMM:
            ptr, self._fd = _cuda.vmm_create(device, size, self._places[self.link.rank])
            self._own = _Memory(ptr, partial(_cuda.vmm_close, device, ptr, size, self._is_placed))
        else:
            ptr, self._handle = _cuda.ipc_create(device, size)
            self._own = _Memory(ptr, partial(_cuda.ipc_destroy, device, ptr))
        _offers[self._key] = self._own

    def exchange(self, problem: str) -> tuple[list[Facts], list[int]]:
        """Offer this rank's region; return the offers and descriptors of all ranks. Collective.

        Without descriptors if not all ranks have something to offer.
        """
        mine = {"problem": problem, "key": self._key, "handle": self._handle.hex()}
        offers = self.link.gather(mine)
        if self.route != VMM or any(offer["problem"] for offer in offers):
            return offers, []
        fd, self._fd = self._fd, -1
        return offers, self.link.exchange_fds(fd)

    def open(self, offers: Sequence[Facts], fds: Sequence[int]) -> None:
        """Map the regions of all ranks."""
        for rank, offer in enumerate(offers):
            if rank == self.link.rank and self._own is not None:
                self.ptrs[rank] = self._own.ptr
                continue
            self._mapped.append(self._open(rank, offer, fds[rank] if fds else -1))
            self.ptrs[rank] = self._mapped[-1].ptr

    def is_offered(self, rank: int) -> bool:
        """Whether a rank's memory is used here by its own address."""
        hello = self.hellos[rank]
        return hello.process == PROCESS and (self.route == IPC or hello.device == self.device)

    def _open(self, rank: int, offer: Facts, fd: int) -> _Memory:
        device, size, hello = self.device, self.num_bytes, self.hellos[rank]
        if self.is_offered(rank):
            if hello.device != device:
                _cuda.enable_peer_access(device, hello.device)
            return _offers[offer["key"]].retain()
        if self.route == VMM:
            ptr = _cuda.vmm_open(device, fd, size, self._places[rank])
            return _Memory(ptr, partial(_cuda.vmm_close, device, ptr, size, self._is_placed))
        ptr = _cuda.ipc_open(device, bytes.fromhex(offer["handle"]))
        return _Memory(ptr, partial(_cuda.ipc_close, device, ptr))

    def unmap(self) -> None:
        """Let go of the peers' regions."""
        for arena in self.arenas:
            arena.unmap()
        mapped, self._mapped = self._mapped, []
        for memory in mapped:
            memory.release()

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses in which arenas can be placed, until the regions are freed."""
        self._reserved.append((_cuda.vmm_reserve(self.device, num_bytes), num_bytes))
        return self._reserved[-1][0]

    def give_addresses_back(self) -> None:
        """Give back all that were reserved; no memory lies there any more."""
        reserved, self._reserved = self._reserved, []
        for ptr, num_bytes in reserved:
            _cuda.vmm_unreserve(self.device, ptr, num_bytes)

    def set_up_multicast(self, group: _cuda.Group) -> None:
        """Let `group` have the switch add, if it can. Collective."""
        if self.no_multicast:
            return
        if self.route == VMM:
            self.no_multicast = join_multicast(self, self.link, group)
        else:
            self.no_multicast = f"memory by the route {self.route} can't be bound"

    def close_multicast(self) -> None:
        """Take this rank's region from behind the common address; no rank may use it any more."""
        multicast, self.multicast = self.multicast, None
        if multicast is not None:
            multicast.close()

    def free(self) -> None:
        """Let go of this rank's own region; no other process may still have it mapped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for arena in self.arenas:
            arena.free()
        self.give_addresses_back()
        _offers.pop(self._key, None)
        own, self._own = self._own, None
        try:
            self.close_multicast()
        finally:
            if own is not None:
                own.release()

    def leave(self, pin: "weakref.ref[Pin] | None" = None) -> None:
        """Unmap and free everything, for good; the group's sockets are about to be closed.

        This rank's own region stays while `pin` lives: symmetric tensors may lie in it.
        """
        self.unmap()
        # By the route `vmm` a peer's mapping keeps the memory; the switch's keeps nothing.
        others = [
            fd
            for fd, hello in zip(self.link.socket_fds, self.hellos, strict=True)
            if fd >= 0
            and (self.multicast is not None or (self.route == IPC and hello.process != PROCESS))
        ]
        _parked.append(_Parked(self.free, others, pin))
        reap()


class Pin:
    """Keeps a rank's own region after its group has left: its symmetric tensors hold it."""

    def __init__(self) -> None:
        finalizer = weakref.finalize(self, reap)
        finalizer.atexit = False  # at exit the memory goes with the process


class _Parked:
    """A rank's own region, waiting to be freed; the process's end frees it too.

    It waits for its tensors and, where memory must outlive its mappings, for the peers to leave. A
    peer lets go of its mappings before it leaves, and leaving shows on its socket.
    """

    def __init__(
        self, free: Callable[[], None], socket_fds: Sequence[int], pin: "weakref.ref[Pin] | None"
    ) -> None:
        self.free = free
        self.pin = pin
        self.sockets = [socket.socket(fileno=os.dup(fd)) for fd in socket_fds]
        for connection in self.sockets:
            # The copy keeps the connection open, but the peer is to see this rank leave.
            connection.shutdown(socket.SHUT_WR)

    def alone(self) -> bool:
        """Whether no tensor and no peer needs it any more."""
        if self.pin is not None and self.pin() is not None:
            return False
        poll = select.poll()
        for connection in self.sockets:
            poll.register(connection, select.POLLRDHUP)
        gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR
        return sum(bool(events & gone) for _, events in poll.poll(0)) == len(self.sockets)


_parked: list[_Parked] = []


def reap() -> None:
    """Free the regions that were left and are not needed any more."""
    for parked in list(_parked):
        if parked.alone() and parked in _parked:
            _parked.remove(parked)
            for connection in parked.sockets:
                connection.close()
            parked.free()


def map_regions(
    hellos: Sequence[DeviceHello], terms: Terms, link: Link
) -> tuple[Regions | None, _cuda.Group, dict[str, str]]:
    """Map the regions of all ranks by the first route that works on every pair. Collective.

    Returns:
        The regions, the C++ group on them, and why each earlier route was not taken. Without
        regions if no route works and NCCL can carry.

    Raises:
        UnsupportedError: No route works, nor does NCCL; the text says why for each.
    """
    reasons: dict[str, str] = {}
    for route in terms.routes:
        regions = Regions(route, hellos, terms.num_bytes, link)
        regions.no_multicast = terms.no_multicast
        try:
            group, reasons[route] = _try(regions, terms, link)
            if group is not None:
                regions.set_up_multicast(group)
        except BaseException:  # a peer was lost on the way: this group is over
            regions.leave()
            raise
        if group is not None:
            del reasons[route]
            return regions, group, reasons
        regions.unmap()
        link.gather({})  # no rank has a peer's region mapped any more
        regions.free()
    if not terms.no_nccl:
        own = hellos[link.rank].device
        nowhere = [0] * len(hellos)
        return None, _cuda.Group(own, link.rank, nowhere, terms.num_channels), reasons
    reasons["nccl"] = terms.no_nccl
    tried = "; ".join(f"{route}: {reason}" for route, reason in reasons.items())
    raise UnsupportedError(f"the GPUs of this group do not reach each other's memory: {tried}")


def map_memory(regions: Regions) -> tuple[list[Facts], str]:
    """Make memory and map all ranks'; return the offers, and this rank's problem. Collective.

    If a rank could make none, all ranks return that problem.
    """
    offers, fds = regions.exchange(problem_of(regions.create))
    try:
        if problem := problems(offers):
            return offers, problem
        return offers, problem_of(partial(regions.open, offers, fds))
    finally:
        for fd in fds:
            os.close(fd)


def _try(regions: Regions, terms: Terms, link: Link) -> tuple[_cuda.Group | None, str]:
    """Take the steps of one route together, until it works or a rank can't go on."""
    offers, problem = map_memory(regions)
    if problems(offers):
        return None, problem
    group: _cuda.Group | None = None
    if not problem:
        try:
            group = _cuda.Group(
                *(regions.device, link.rank, regions.ptrs, terms.num_channels, terms.shares),
                starts_early=env.GPU_EARLY_START.get() == "auto",
            )
        except FastcollError as error:
            problem = str(error)
    token = int(offers[0]["key"], 16)
    for step in (partial(_put, group, token), partial(_get, group, token, len(offers))):
        if problem := try_together(link, step, problem):
            return None, problem
    return group, ""


def _put(group: _cuda.Group | None, token: int) -> None:
    if group is not None:
        group.probe(_cuda.Probe.put, token)


def _get(group: _cuda.Group | None, token: int, world_size: int) -> None:
    seen = group.probe(_cuda.Probe.get, token)[:world_size] if group is not None else []
    bad = [peer for peer, bits in enumerate(seen) if bits != _cuda.K_PROBE_OK]
    if bad:
        raise UnsupportedError(f"mapped, but what was written or read did not arrive: ranks {bad}")
