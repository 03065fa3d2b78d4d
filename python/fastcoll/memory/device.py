# SPDX-License-Identifier: Apache-2.0
"""The ranks' regions on their GPUs: made, handed over, mapped, tried out and taken down.

Decides by which route ranks reach each other's memory, and that all take the same one: the first
of which every rank has seen a write and a read arrive on every pair. Ranks that are threads of
one process share pointers where they share a device. Must not know verbs or streams.
"""

import os
import secrets
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from fastcoll import _cuda
from fastcoll.errors import FastcollError, UnsupportedError, UsageError
from fastcoll.memory.link import Facts, Link, problem_of, problems, take_step
from fastcoll.memory.multicast import join_multicast
from fastcoll.topology.gpu import (
    USUAL_CHANNELS,
    Gpu,
    multicast_problem,
    nccl_name,
    nccl_problem,
)

# What maps memory from its descriptor keeps it, so ranks may leave in any order: tried first.
VMM, IPC = "vmm", "ipc"
ROUTES = (VMM, IPC)

_process = secrets.token_hex(8)  # tells processes apart, in any namespace


@dataclass(frozen=True)
class DeviceHello:
    """What a rank tells the others when a group comes to its GPUs.

    Attributes:
        problem: Why this rank can't use its GPU; empty if it can.
        free_blocks: Thread blocks that may still be resident on its device.
        heap_bytes: What it would give to symmetric tensors.
        most_channels: The most channels it wants; 0 leaves it to the group.
        granularity: What the size of a region must be a multiple of there.
        nccl: `nccl_name()` there.
        no_table: Why the tuning table can't be used for its GPU; empty if it can.
        no_multicast: `Gpu.no_multicast` there, or what else speaks against it.
    """

    problem: str
    device: int
    uuid: str
    process: str
    layout: str
    has_vmm: bool
    granularity: int
    free_blocks: int
    heap_bytes: int
    most_channels: int
    nccl: str = ""
    no_table: str = ""
    no_multicast: str = ""


@dataclass(frozen=True)
class Terms:
    """What all ranks derive alike from everybody's introduction.

    Attributes:
        num_channels: Thread blocks of each rank's kernels.
        ranks_per_gpu: The most ranks that share one device.
        routes: In which order to try.
        no_nccl: Why NCCL can't carry between the ranks; empty: it can.
        reaches_peers: Whether a route was found; else NCCL carries all.
        no_table: Why the group's tuning table says nothing of its GPUs; empty: it is used.
        no_multicast: Why the switch can't add for the ranks; empty: it can, once that was tried.
    """

    num_bytes: int
    data_bytes: int
    num_channels: int
    ranks_per_gpu: int
    routes: tuple[str, ...]
    no_nccl: str = ""
    reaches_peers: bool = True
    no_table: str = ""
    no_multicast: str = ""


def settle(hellos: Sequence[DeviceHello], data_offset_bytes: int) -> Terms:
    """Derive the terms of a group on GPUs. Pure: every rank comes to the same ones.

    Unless it is told a number, a group takes half of what is free on its fullest device at most, so
    that others find room too.

    Raises:
        UnsupportedError: A rank can't use its GPU, or there is no room on one.
        UsageError: The ranks' builds differ.
    """
    problems = [f"rank {rank}: {h.problem}" for rank, h in enumerate(hellos) if h.problem]
    if problems:
        raise UnsupportedError("not every rank can use its GPU: " + "; ".join(problems))
    if len({hello.layout for hello in hellos}) > 1:
        sides = ", ".join(f"rank {rank}: {hello.layout}" for rank, hello in enumerate(hellos))
        raise UsageError(f"the ranks of a group need equal builds of fastcoll's GPU part: {sides}")
    on_device: dict[str, list[DeviceHello]] = {}
    for hello in hellos:
        on_device.setdefault(hello.uuid, []).append(hello)
    wishes = [hello.most_channels for hello in hellos if hello.most_channels]
    channels = min([_cuda.K_MAX_CHANNELS, *wishes]) if wishes else USUAL_CHANNELS
    for uuid, there in on_device.items():
        free = min(hello.free_blocks for hello in there)
        if free < len(there):
            raise UnsupportedError(
                f"{len(there)} ranks on GPU {uuid} need a resident thread block each, but {free} "
                "are free: use fewer ranks on that GPU, or close other groups first"
            )
        share = free // len(there)
        channels = min(channels, share if wishes else max(1, share // 2))
    ranks_per_gpu = max(map(len, on_device.values()))
    granularity = max(hello.granularity for hello in hellos)
    heap_bytes = min(hello.heap_bytes for hello in hellos)
    num_bytes = -(-(data_offset_bytes + heap_bytes) // granularity) * granularity
    return Terms(
        num_bytes=num_bytes,
        data_bytes=num_bytes - data_offset_bytes,
        num_channels=channels,
        ranks_per_gpu=ranks_per_gpu,
        routes=ROUTES if all(hello.has_vmm for hello in hellos) else (IPC,),
        no_nccl=nccl_problem([hello.nccl for hello in hellos], ranks_per_gpu),
        no_table=next(
            (f"rank {rank}: {h.no_table}" for rank, h in enumerate(hellos) if h.no_table), ""
        ),
        no_multicast=multicast_problem([hello.no_multicast for hello in hellos], ranks_per_gpu),
    )


def introduce(
    facts: Gpu, world_size: int, *, free_blocks: int, heap_bytes: int, most_channels: int
) -> Facts:
    """Return this rank's introduction to a group."""
    granularity = _cuda.vmm_granularity(facts.index) if facts.has_vmm_fds else 2 << 20
    no_multicast = facts.no_multicast
    if not no_multicast and world_size > 1:
        try:
            least_bytes = _cuda.multicast_granularity(world_size, granularity)
            granularity = max(granularity, least_bytes)
        except FastcollError as error:
            no_multicast = str(error)
    hello = DeviceHello(
        problem="",
        device=facts.index,
        uuid=facts.uuid,
        process=_process,
        layout=_cuda.layout(),
        has_vmm=facts.has_vmm_fds,
        granularity=granularity,
        free_blocks=free_blocks,
        heap_bytes=heap_bytes,
        most_channels=most_channels,
        nccl=nccl_name(),
        no_multicast=no_multicast,
    )
    return asdict(hello)


def apologise(problem: str) -> Facts:
    """Return the introduction of a rank that can't use its GPU."""
    return asdict(DeviceHello(problem, -1, "", _process, "", False, 1, 0, 0, 0))


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


# What ranks of this process offer to each other, by a random key.
_offers: dict[str, _Memory] = {}


class Regions:
    """Every rank's region as mapped here.

    Attributes:
        route: How they came here.
        ptrs: Addresses by rank.
        num_bytes: Of each.
        multicast: The object that all of them are behind, if the group has one.
        no_multicast: Why it has none.
    """

    def __init__(self, route: str, hellos: Sequence[DeviceHello], terms: Terms, link: Link) -> None:
        self.route = route
        self.ptrs = [0] * len(hellos)
        self.device = hellos[link.rank].device
        self._hellos = hellos
        self.num_bytes = terms.num_bytes
        self.multicast: _cuda.Multicast | None = None
        self.no_multicast = terms.no_multicast
        self._link = link
        self._mapped: list[_Memory] = []
        self._own: _Memory | None = None
        self._fd = -1
        self._handle = b""
        self._key = secrets.token_hex(8)

    def create(self) -> None:
        """Make this rank's own region, of zeroes."""
        size, device = self.num_bytes, self.device
        if self.route == VMM:
            ptr, self._fd = _cuda.vmm_create(device, size)
            self._own = _Memory(ptr, partial(_cuda.vmm_close, device, ptr, size))
        else:
            ptr, self._handle = _cuda.ipc_create(device, size)
            self._own = _Memory(ptr, partial(_cuda.ipc_destroy, device, ptr))
        _offers[self._key] = self._own

    def exchange(self, problem: str) -> tuple[list[Facts], list[int]]:
        """Offer this rank's region and return everybody's offers and descriptors. Collective.

        Without descriptors if not all ranks have something to offer.
        """
        mine = {"problem": problem, "key": self._key, "handle": self._handle.hex()}
        offers = self._link.gather(mine)
        if self.route != VMM or any(offer["problem"] for offer in offers):
            return offers, []
        fd, self._fd = self._fd, -1
        return offers, self._link.exchange_fds(fd)

    def open(self, offers: Sequence[Facts], fds: Sequence[int]) -> None:
        """Map everybody's region."""
        for rank, offer in enumerate(offers):
            if rank == self._link.rank and self._own is not None:
                self.ptrs[rank] = self._own.ptr
                continue
            self._mapped.append(self._open(self._hellos[rank], offer, fds[rank] if fds else -1))
            self.ptrs[rank] = self._mapped[-1].ptr

    def _open(self, hello: DeviceHello, offer: Facts, fd: int) -> _Memory:
        device, size = self.device, self.num_bytes
        if hello.process == _process and (self.route == IPC or hello.device == device):
            if hello.device != device:
                _cuda.enable_peer_access(device, hello.device)
            return _offers[offer["key"]].retain()
        if self.route == VMM:
            ptr = _cuda.vmm_open(device, fd, size)
            return _Memory(ptr, partial(_cuda.vmm_close, device, ptr, size))
        ptr = _cuda.ipc_open(device, bytes.fromhex(offer["handle"]))
        return _Memory(ptr, partial(_cuda.ipc_close, device, ptr))

    def unmap(self) -> None:
        """Let go of the peers' regions."""
        mapped, self._mapped = self._mapped, []
        for memory in mapped:
            memory.release()

    def come_to_multicast(self, group: _cuda.Group) -> None:
        """Let `group` have the switch add, if it can. Collective."""
        if self.no_multicast:
            return
        if self.route == VMM:
            self.no_multicast = join_multicast(self, self._link, group)
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
            for fd, hello in zip(self._link.socket_fds, self._hellos, strict=True)
            if fd >= 0
            and (self.multicast is not None or (self.route == IPC and hello.process != _process))
        ]
        _parked.append(_Parked(self.free, others, pin))
        reap()


class Pin:
    """What keeps a rank's own region after its group has left: its symmetric tensors hold it."""

    def __init__(self) -> None:
        finalizer = weakref.finalize(self, reap)
        finalizer.atexit = False  # at exit the memory goes with the process


class _Parked:
    """A rank's own region, waiting to be freed; the process's end frees it too.

    It waits for its tensors and, where memory must outlive its mappings, for the peers to leave: a
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
        """Whether nobody needs it any more."""
        if self.pin is not None and self.pin() is not None:
            return False
        poll = select.poll()
        for connection in self.sockets:
            poll.register(connection, select.POLLRDHUP)
        gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR
        return sum(bool(events & gone) for _, events in poll.poll(0)) == len(self.sockets)


_parked: list[_Parked] = []


def reap() -> None:
    """Free the regions that were left and that nobody needs any more."""
    for parked in list(_parked):
        if parked.alone() and parked in _parked:
            _parked.remove(parked)
            for connection in parked.sockets:
                connection.close()
            parked.free()


def map_regions(
    hellos: Sequence[DeviceHello], terms: Terms, link: Link
) -> tuple[Regions | None, _cuda.Group, dict[str, str]]:
    """Map everybody's region by the first route that works on every pair. Collective.

    Returns:
        The regions, the C++ group on them, and why each earlier route was not taken. Without
        regions if no route works and NCCL can carry.

    Raises:
        UnsupportedError: No route works, nor does NCCL; the text says why for each.
    """
    reasons: dict[str, str] = {}
    for route in terms.routes:
        regions = Regions(route, hellos, terms, link)
        try:
            group, reasons[route] = _try(regions, terms, link)
            if group is not None:
                regions.come_to_multicast(group)
        except BaseException:  # a peer was lost on the way: this group is over
            regions.leave()
            raise
        if group is not None:
            del reasons[route]
            return regions, group, reasons
        regions.unmap()
        link.gather({})  # nobody has a peer's region mapped any more
        regions.free()
    if not terms.no_nccl:
        own = hellos[link.rank].device
        return None, _cuda.Group(own, link.rank, [0] * len(hellos), 0), reasons
    reasons["nccl"] = terms.no_nccl
    tried = "; ".join(f"{route}: {reason}" for route, reason in reasons.items())
    raise UnsupportedError(f"the GPUs of this group do not reach each other's memory: {tried}")


def _try(regions: Regions, terms: Terms, link: Link) -> tuple[_cuda.Group | None, str]:
    """Take the steps of one route together, until it works or a rank can't go on."""
    offers, fds = regions.exchange(problem_of(regions.create))
    group: _cuda.Group | None = None
    try:
        if problem := problems(offers):
            return None, problem
        regions.open(offers, fds)
        group = _cuda.Group(regions.device, link.rank, regions.ptrs, terms.data_bytes)
        problem = ""
    except (FastcollError, OSError) as error:
        problem = str(error)
    finally:
        for fd in fds:
            os.close(fd)
    token = int(offers[0]["key"], 16)
    for step in (partial(_put, group, token), partial(_get, group, token, len(offers))):
        if problem := take_step(link, step, problem):
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
