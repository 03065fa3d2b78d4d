# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver made of dictionaries, and ranks that map its memory together.

The driver can refuse calls or lose writes on purpose. It complains about errors that a real driver
punishes: mappings closed twice, steps that would block, and memory freed too early. Memory is freed
too early while a peer has it mapped or the switch may read it. Ranks are threads.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fastcoll.errors import DriverError, PeerLostError
from fastcoll.types import Op


class Probe(Enum):
    put = 0
    get = 1
    operands = 2
    reduce = 3
    stored = 4


class Driver:
    """Physical memories, and the addresses they are mapped at."""

    K_PROBE_OK = 3
    K_MAX_CHANNELS = 64
    Probe = Probe

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ptrs = count(0x1000, 0x1000)
        self.mapped: dict[int, dict[Any, int]] = {}  # address -> memory
        self.exported: dict[Any, dict[Any, int]] = {}  # handle -> memory
        self.open_ipc: dict[int, int] = {}  # address of an opened handle -> the owner's address
        self.refused: set[tuple[str, int]] = set()  # (function, device)
        self.lost: set[tuple[str, int]] = set()  # (route, device whose writes get lost)
        self.handles: list[Multicast] = []  # not closed yet
        self.objects: dict[int, Object] = {}  # by their descriptors
        self.reserved: dict[int, int] = {}  # address -> bytes
        self.route = ""
        self.early_starts: list[bool] = []  # of each group
        self.peer_access: set[tuple[int, int]] = set()

    def refuse(self, function: str, device: int) -> None:
        """Raise the error of a call, if it is refused."""
        if (function, device) in self.refused:
            raise DriverError(f"{function} refused")

    def _map(self, function: str, device: int, memory: dict[Any, int], at: int = 0) -> int:
        self.refuse(function, device)
        with self.lock:
            ptr = at or next(self.ptrs)
            assert ptr not in self.mapped, "something lies there"
            assert not at or any(one <= at < one + size for one, size in self.reserved.items())
            self.mapped[ptr] = memory
        return ptr

    def vmm_reserve(self, device: int, num_bytes: int) -> int:
        self.refuse("vmm_reserve", device)
        with self.lock:
            ptr = (1 << 50) + next(self.ptrs) * (num_bytes >> 12)
            self.reserved[ptr] = num_bytes
        return ptr

    def vmm_unreserve(self, device: int, ptr: int, num_bytes: int) -> None:
        with self.lock:
            inside = [one for one in self.mapped if ptr <= one < ptr + num_bytes]
            assert not inside, "memory lies there"
            assert self.reserved.pop(ptr) == num_bytes

    def vmm_create(self, device: int, num_bytes: int, at: int = 0) -> tuple[int, int]:
        self.route = "vmm"
        memory: dict[Any, int] = {}
        ptr = self._map("vmm_create", device, memory, at)
        fd = os.memfd_create("fake")
        self.exported[os.fstat(fd).st_ino] = memory
        return ptr, fd

    def vmm_open(self, device: int, fd: int, num_bytes: int, at: int = 0) -> int:
        return self._map("vmm_open", device, self.exported[os.fstat(fd).st_ino], at)

    def vmm_close(self, device: int, ptr: int, num_bytes: int, is_placed: bool = False) -> None:
        assert is_placed == any(one <= ptr < one + size for one, size in self.reserved.items())
        del self.mapped[ptr]

    def ipc_create(self, device: int, num_bytes: int) -> tuple[int, bytes]:
        self.route = "ipc"
        memory: dict[Any, int] = {}
        ptr = self._map("ipc_create", device, memory)
        handle = ptr.to_bytes(8, "little")
        self.exported[handle] = memory
        return ptr, handle

    def ipc_open(self, device: int, handle: bytes) -> int:
        ptr = self._map("ipc_open", device, self.exported[handle])
        self.open_ipc[ptr] = int.from_bytes(handle, "little")
        return ptr

    def ipc_close(self, device: int, ptr: int) -> None:
        del self.open_ipc[ptr]
        del self.mapped[ptr]

    def ipc_destroy(self, device: int, ptr: int) -> None:
        assert ptr not in self.open_ipc.values(), "freed while a peer has it mapped"
        del self.mapped[ptr]

    def enable_peer_access(self, device: int, peer: int) -> None:
        self.peer_access.add((device, peer))

    def vmm_granularity(self, device: int) -> int:
        return 2 << 20

    def multicast_granularity(self, world_size: int, least_bytes: int) -> int:
        self.refuse("multicast_granularity", 0)
        return 32 << 20

    def layout(self) -> str:
        return "1"

    def Multicast(self, device: int, world: int, num_bytes: int, fd: int = -1) -> "Multicast":  # noqa: N802
        return Multicast(self, device, world, fd)

    def region_bytes(self, num_channels: int, world_size: int) -> int:
        return 4096

    def Group(  # noqa: N802
        self,
        device: int,
        rank: int,
        regions: list[int],
        num_channels: int,
        shares: bool = False,
        *,
        starts_early: bool = True,
    ) -> "Group":
        self.early_starts.append(starts_early)
        return Group(self, device, rank, regions)


class Object:
    """A multicast object: the memories behind its address, by device."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.devices: set[int] = set()
        self.bound: dict[int, dict[Any, int]] = {}

    def is_complete(self) -> bool:
        return len(self.devices) == self.world_size


class Multicast:
    """Replaces `_cuda.Multicast`: one rank's handle of an object."""

    def __init__(self, driver: Driver, device: int, world_size: int, fd: int) -> None:
        self.driver, self.device, self.ptr = driver, device, 0
        driver.refuse("multicast_create" if fd < 0 else "multicast_open", device)
        found = driver.objects[os.fstat(fd).st_ino] if fd >= 0 else Object(world_size)
        self.object = found
        driver.handles.append(self)

    def export_fd(self) -> int:
        self.driver.refuse("multicast_export", self.device)
        fd = os.memfd_create("fake")
        self.driver.objects[os.fstat(fd).st_ino] = self.object
        return fd

    def add_device(self) -> None:
        self.driver.refuse("multicast_add", self.device)
        assert self.device not in self.object.devices, "a device twice"
        self.object.devices.add(self.device)

    def bind(self, region: int) -> None:
        self.driver.refuse("multicast_bind", self.device)
        assert self.object.is_complete(), "bound before all devices were added: that would block"
        self.object.bound[self.device] = self.driver.mapped[region]

    def map(self, at: int = 0) -> int:
        assert self.object.is_complete(), "mapped before all devices were added: that would block"
        self.ptr = self.driver._map("multicast_map", self.device, {}, at)
        return self.ptr

    def close(self) -> None:
        assert self in self.driver.handles, "closed twice"
        memory = self.object.bound.pop(self.device, None)
        freed = memory is not None and all(one is not memory for one in self.driver.mapped.values())
        assert not freed, "freed while bound"
        if self.ptr:
            del self.driver.mapped[self.ptr]
        self.driver.handles.remove(self)


class Group:
    """Replaces `_cuda.Group`: the kernels that probe mapped memory."""

    def __init__(self, driver: Driver, device: int, rank: int, regions: list[int]) -> None:
        self.driver, self.device, self.rank, self.regions = driver, device, rank, regions
        self.multicast = 0
        self.heap: tuple[list[int], int, int] | None = None  # of the last `use_heap`

    def use_multicast(self, ptr: int) -> None:
        self.multicast = ptr

    def use_heap(self, ptrs: list[int], num_bytes: int, multicast: int) -> None:
        self.heap = (list(ptrs), num_bytes, multicast)

    def probe(self, step: Probe, token: int) -> list[int]:
        return list(getattr(self, f"_{step.name}")(token))

    def _put(self, token: int) -> Iterator[int]:
        for to, ptr in enumerate(self.regions):
            if (self.driver.route, self.device) not in self.driver.lost or to == self.rank:
                self.driver.mapped[ptr][self.rank] = token + to
            yield 0

    def _get(self, token: int) -> Iterator[int]:
        mine = self.driver.mapped[self.regions[self.rank]]
        for peer, ptr in enumerate(self.regions):
            pushed = mine.get(peer) == token + self.rank
            pulled = self.driver.mapped[ptr].get(peer) == token + peer
            yield pushed * 1 + pulled * 2

    def _operands(self, token: int) -> Iterator[int]:
        for by in range(len(self.regions)):
            self.driver.mapped[self.regions[self.rank]]["operand", by] = token + self.rank * by
            yield 0

    def _behind(self) -> list[dict[Any, int]]:
        (handle,) = (one for one in self.driver.handles if one.ptr == self.multicast)
        return list(handle.object.bound.values())

    def _reduce(self, token: int) -> Iterator[int]:
        total = sum(one["operand", self.rank] for one in self._behind())
        for memory in self._behind():
            if ("store", self.device) not in self.driver.lost:
                memory["stored", self.rank] = token
        wanted = sum(token + by * self.rank for by in range(len(self.regions)))
        for dtype in ("float32", "float16", "bfloat16", "int32", "uint32", "int64", "uint64"):
            ops = (Op.SUM,) if "float" in dtype else tuple(set(Op) - {Op.AVG, Op.PRODUCT})
            lost = [(f"{op.name} of {dtype}", self.device) in self.driver.lost for op in ops]
            yield sum((total + wrong == wanted) << op for op, wrong in zip(ops, lost, strict=True))

    def _stored(self, token: int) -> Iterator[int]:
        mine = self.driver.mapped[self.regions[self.rank]]
        for by in range(len(self.regions)):
            yield mine.get(("stored", by)) == token


class Links:
    """Rank threads that meet at a barrier; sockets between all of them.

    From the gathering `lost_at` on every rank finds that a peer is gone.
    """

    def __init__(self, world_size: int, lost_at: int = 1000) -> None:
        self.lost_at = lost_at
        self.world_size = world_size
        self.rows: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.socket_fds = [[-1] * world_size for _ in range(world_size)]
        for one in range(world_size):
            for other in range(one):
                pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.socket_fds[one][other] = pair[0].detach()
                self.socket_fds[other][one] = pair[1].detach()

    def link(self, rank: int) -> Any:
        numbers = count()

        def gather(row: Any) -> list[Any]:
            if next(numbers) >= self.lost_at:
                raise PeerLostError("a peer is gone")
            self.rows[rank] = row
            self.barrier.wait()
            rows = list(self.rows)
            self.barrier.wait()
            return rows

        def exchange_fds(fd: int) -> list[int]:
            copies = [fd]  # closed on an error, like those that came
            try:
                theirs = gather(fd)
                copies = [fd if peer == rank else os.dup(one) for peer, one in enumerate(theirs)]
                self.barrier.wait()  # all ranks have their copies
            except PeerLostError:
                for copy in copies:
                    os.close(copy)
                raise
            return copies

        return SimpleNamespace(
            rank=rank, gather=gather, exchange_fds=exchange_fds, socket_fds=self.socket_fds[rank]
        )

    def leave(self, rank: int) -> None:
        for fd in self.socket_fds[rank]:
            if fd >= 0:
                os.close(fd)


def _descriptors() -> dict[str, str]:
    """Return the open descriptors and their files."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder itself, closed by now
            found[entry.name] = os.readlink(entry)
    return found


@contextlib.contextmanager
def fake_driver() -> Iterator[Driver]:
    """Put a driver in the place of `_cuda`; it must be empty at the end."""
    from fastcoll.gpu import multicast, terms
    from fastcoll.gpu import regions as device

    fake = Driver()
    fds_before = _descriptors()
    with contextlib.ExitStack() as patches:
        for module in (device, multicast, terms):
            patches.enter_context(mock.patch.object(module, "_cuda", fake))
        yield fake
    assert fake.handles == [], "multicast objects left behind"
    assert fake.mapped == {}, "memory left behind"
    assert fake.reserved == {}, "addresses left behind"
    assert device._offers == {}
    assert device._parked == []
    # Not the other way round: leftovers of an earlier test may be collected by now.
    new = {fd: where for fd, where in _descriptors().items() if fd not in fds_before}
    assert new == {}, "descriptors left behind"


def map_all(links: Links, devices: list[int], processes: list[str]) -> list[Any]:
    """Return the result of map_regions on every rank, or its error."""
    from fastcoll.gpu.regions import map_regions
    from fastcoll.gpu.terms import DeviceHello, agree_terms

    hellos = [
        DeviceHello("", index, str(index), process, "1", True, 1, 100, 0, 0)
        for index, process in zip(devices, processes, strict=True)
    ]
    terms = agree_terms(hellos, lambda num_channels, world_size: 4096)
    results: list[Any] = [None] * len(devices)

    def run(rank: int) -> None:
        try:
            results[rank] = map_regions(hellos, terms, links.link(rank))
        except BaseException as error:
            results[rank] = error

    run_ranks(links, run)
    return results


def run_ranks(links: Links, task: Callable[[int], None]) -> None:
    """Let each rank do a task, all at once; raise the first error, for which no peer waits."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            task(rank)
        except BaseException as error:
            errors.append(error)
            links.barrier.abort()

    with ThreadPoolExecutor(links.world_size) as pool:
        pool.map(run, range(links.world_size))
    if errors:
        raise errors[0]


THREE = ["one", "two", "three"]  # three processes


@contextlib.contextmanager
def mapped(
    devices: list[int], processes: list[str], order: list[int] | None = None
) -> Iterator[list[Any]]:
    """Give what `map_all` does; then the ranks leave, in an order."""
    from fastcoll.gpu import regions as device

    links = Links(len(devices))
    results = map_all(links, devices, processes)
    yield results
    for rank in order or range(len(devices)):
        if not isinstance(results[rank], BaseException):
            results[rank][0].leave()
        links.leave(rank)
    device.reap()
