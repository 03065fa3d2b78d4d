# SPDX-License-Identifier: Apache-2.0
"""How ranks come to each other's GPU memory, over a driver made of dictionaries.

The driver can refuse things or lose writes on purpose, and it complains about what a real one
punishes: memory that is freed while another process has it mapped, or mappings closed twice.
Ranks are threads.
"""

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastcoll.errors import DriverError, UnsupportedError
from fastcoll.topology import gpu

pytestmark = pytest.mark.skipif(
    "built without" in gpu.problem(), reason="not run: this build has no GPU part (no nvcc)"
)


class Driver:
    """Physical memories, and the addresses they are mapped at."""

    K_PROBE_OK = 3
    K_MAX_CHANNELS = 64

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ptrs = count(0x1000, 0x1000)
        self.mapped: dict[int, dict[Any, int]] = {}  # address -> memory
        self.exported: dict[Any, dict[Any, int]] = {}  # handle -> memory
        self.open_ipc: dict[int, int] = {}  # address of an opened handle -> the owner's address
        self.refused: set[tuple[str, int]] = set()  # (function, device)
        self.lost: set[tuple[str, int]] = set()  # (route, device whose writes get lost)
        self.route = ""
        self.peer_access: set[tuple[int, int]] = set()

    def _map(self, function: str, device: int, memory: dict[Any, int]) -> int:
        if (function, device) in self.refused:
            raise DriverError(f"{function} refused")
        with self.lock:
            ptr = next(self.ptrs)
            self.mapped[ptr] = memory
        return ptr

    def vmm_create(self, device: int, num_bytes: int) -> tuple[int, int]:
        self.route = "vmm"
        memory: dict[Any, int] = {}
        ptr = self._map("vmm_create", device, memory)
        fd = os.memfd_create("fake")
        self.exported[os.fstat(fd).st_ino] = memory
        return ptr, fd

    def vmm_open(self, device: int, fd: int, num_bytes: int) -> int:
        return self._map("vmm_open", device, self.exported[os.fstat(fd).st_ino])

    def vmm_close(self, device: int, ptr: int, num_bytes: int) -> None:
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

    def Group(self, device: int, rank: int, regions: list[int], data_bytes: int) -> Any:  # noqa: N802
        def put(token: int) -> None:
            for to, ptr in enumerate(regions):
                if (self.route, device) not in self.lost or to == rank:
                    self.mapped[ptr][rank] = token + to

        def get(token: int) -> list[int]:
            seen = []
            for peer, ptr in enumerate(regions):
                pushed = self.mapped[regions[rank]].get(peer) == token + rank
                pulled = self.mapped[ptr].get(peer) == token + peer
                seen.append(pushed * 1 + pulled * 2)
            return seen

        return SimpleNamespace(probe_put=put, probe_get=get)


class Links:
    """Rank threads that meet at a barrier; sockets between all of them."""

    def __init__(self, world_size: int) -> None:
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
        def gather(row: Any) -> list[Any]:
            self.rows[rank] = row
            self.barrier.wait()
            rows = list(self.rows)
            self.barrier.wait()
            return rows

        def exchange_fds(fd: int) -> list[int]:
            theirs = gather(fd)
            copies = [fd if peer == rank else os.dup(other) for peer, other in enumerate(theirs)]
            gather(None)  # everybody has its copies
            return copies

        return SimpleNamespace(
            rank=rank, gather=gather, exchange_fds=exchange_fds, socket_fds=self.socket_fds[rank]
        )

    def leave(self, rank: int) -> None:
        for fd in self.socket_fds[rank]:
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    from fastcoll.memory import device

    fake = Driver()
    monkeypatch.setattr(device, "_cuda", fake)
    fds_before = set(Path("/proc/self/fd").iterdir())
    yield fake
    assert fake.mapped == {}, "memory left behind"
    assert device._offers == {}
    assert device._parked == []
    assert set(Path("/proc/self/fd").iterdir()) == fds_before, "descriptors left behind"


def come(links: Links, devices: list[int], processes: list[str]) -> list[Any]:
    """What map_regions gives every rank, or raises there."""
    from fastcoll.memory import device

    hellos = [
        device.DeviceHello("", index, str(index), process, "1", True, 1, 100, 0, 0)
        for index, process in zip(devices, processes, strict=True)
    ]
    terms = device.settle(hellos, 4096)
    results: list[Any] = [None] * len(devices)

    def run(rank: int) -> None:
        try:
            results[rank] = device.map_regions(hellos, terms, links.link(rank))
        except BaseException as error:
            results[rank] = error

    run_all([lambda rank=rank: run(rank) for rank in range(len(devices))])
    return results


def run_all(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def leave_all(links: Links, results: list[Any], order: list[int]) -> None:
    from fastcoll.memory import device

    for rank in order:
        if not isinstance(results[rank], BaseException):
            results[rank][0].leave()
        links.leave(rank)
    device.reap()


THREE = ["one", "two", "three"]  # three processes


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_descriptors_are_the_first_choice(driver: Driver, order: list[int]) -> None:
    links = Links(3)
    results = come(links, [0, 1, 2], THREE)
    for regions, _, reasons in results:
        assert regions.route == "vmm"
        assert reasons == {}
        assert 0 not in regions.ptrs
    assert len({ptr for regions, _, _ in results for ptr in regions.ptrs}) == 9
    leave_all(links, results, order)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"refused": {("vmm_create", 1)}}, "rank 1: vmm_create refused"),
        ({"refused": {("vmm_open", 2)}}, "rank 2: vmm_open refused"),
        # Writes of device 1 get lost: those who look for them say so.
        ({"lost": {("vmm", 1)}}, "rank 0: mapped, but what was written or read did not arrive"),
    ],
)
def test_where_one_rank_cannot_all_take_the_next_route(
    driver: Driver, fault: dict[str, set[Any]], reason: str
) -> None:
    for name, value in fault.items():
        setattr(driver, name, value)
    links = Links(3)
    results = come(links, [0, 1, 2], THREE)
    for regions, _, reasons in results:
        assert regions.route == "ipc"
        assert reason in reasons["vmm"]
    assert len({reasons["vmm"] for _, _, reasons in results}) == 1, "the same reason on all ranks"
    leave_all(links, results, [1, 2, 0])


def test_where_no_route_works_every_rank_says_why(driver: Driver) -> None:
    driver.refused = {("vmm_open", 0), ("ipc_open", 2)}
    links = Links(3)
    results = come(links, [0, 1, 2], THREE)
    for error in results:
        assert isinstance(error, UnsupportedError)
        assert "vmm: rank 0: vmm_open refused" in str(error)
        assert "ipc: rank 2: ipc_open refused" in str(error)
    leave_all(links, results, [0, 1, 2])


def test_exported_memory_is_freed_only_when_the_peers_have_left(driver: Driver) -> None:
    driver.refused = {("vmm_create", 0)}
    links = Links(2)
    results = come(links, [0, 1], THREE[:2])
    own = results[0][0].ptrs[0]
    results[0][0].leave()
    links.leave(0)
    assert own in driver.mapped, "rank 1 still has it mapped"
    results[1][0].leave()
    links.leave(1)
    from fastcoll.memory import device

    device.reap()
    assert own not in driver.mapped


def test_ranks_of_one_process_share_pointers(driver: Driver) -> None:
    from fastcoll.memory import device

    links = Links(2)
    results = come(links, [0, 0], [device._process] * 2)
    assert results[0][0].ptrs == results[1][0].ptrs
    results[0][0].leave()
    links.leave(0)
    assert set(results[1][0].ptrs) <= driver.mapped.keys(), "rank 1 may still use it"
    results[1][0].leave()
    links.leave(1)


def test_one_process_with_two_devices_opens_access_between_them(driver: Driver) -> None:
    from fastcoll.memory import device

    driver.refused = {("vmm_create", 0)}
    links = Links(2)
    results = come(links, [0, 1], [device._process] * 2)
    assert driver.peer_access == {(0, 1), (1, 0)}
    leave_all(links, results, [0, 1])


def test_a_region_lives_as_long_as_its_tensors(driver: Driver) -> None:
    from fastcoll.memory import device

    links = Links(2)
    results = come(links, [0, 1], THREE[:2])
    own = results[0][0].ptrs[0]
    pin = device.Pin()
    results[0][0].leave(weakref.ref(pin))
    results[1][0].leave()
    assert own in driver.mapped, "a tensor may still lie in it"
    del pin
    assert own not in driver.mapped
    for rank in range(2):
        links.leave(rank)
