# SPDX-License-Identifier: Apache-2.0
"""Memory and contexts of ranks on a CUDA made of the CPU.

`python -m tests.gpu_host.cuda_programs NAME [EXTENSION]` runs a function of this file.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.fake_cuda import FakeCuda
from tests.support.fake_ranks import LIMIT_S, run_program, tensors_on_gpu

MINE = 3  # this rank's GPU
MIB = 1 << 20
CHANNELS = 8


def in_thread(task: Callable[[], Any]) -> Any:
    """Do something in a fresh thread, which has no device of CUDA; return its result."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(task).result(LIMIT_S)
    finally:
        pool.shutdown(wait=False)


def a_plan() -> Any:
    from fastcoll.choose.algorithms import shared
    from fastcoll.native import _C
    from fastcoll.types import Algorithm
    from tests.gpu_host.gpu_rows import request

    wanted = request(num_channels=CHANNELS)
    return _C.Plan(*shared.make_plan(wanted, Algorithm.two_shot).args())


def a_group(device: int) -> tuple[Any, Callable[[], None]]:
    """Return a group of two regions of this process, and a function that frees them."""
    from fastcoll.native import _cuda

    num_bytes, regions = _cuda.region_bytes(CHANNELS, 2), []
    for _ in range(2):
        ptr, fd = _cuda.vmm_create(device, num_bytes)
        os.close(fd)
        regions.append(ptr)
    group = _cuda.Group(device, 0, regions, CHANNELS, True)
    return group, lambda: [_cuda.vmm_close(device, ptr, num_bytes) for ptr in regions]


def contexts(cuda: FakeCuda) -> None:
    """No thread without a device makes a context on another GPU than this rank's."""
    import torch

    from fastcoll.native import _cuda
    from fastcoll.types import DType, Op

    def step(name: str, task: Callable[[], Any]) -> Any:
        result = in_thread(task)
        assert cuda.contexts() in ([], [MINE]), f"{name}: contexts on {cuda.contexts()}"
        return result

    step("facts", lambda: _cuda.device_facts(MINE))
    step("granularity", lambda: _cuda.vmm_granularity(MINE))
    step("load", lambda: _cuda.load_kernels(MINE))
    group, free = step("group", lambda: a_group(MINE))
    step("probe", lambda: group.probe(_cuda.Probe.put, 1))
    step("launch", lambda: group.launch(a_plan(), 0, 0, 0, 1.0))
    tensor = torch.ones(4)
    row = (True, tensor.data_ptr(), 4, int(DType.float32), 1, 0)
    step("transfer", lambda: group.transfer([row], 1, 0, 1.0))
    step("copy", lambda: group.copy([(0, 0, 0)], 0))
    partials = (MINE, int(DType.float32), int(Op.SUM), False, [64], 64, 1, 0, 0)
    step("add", lambda: _cuda.add_partials(*partials))
    step("busy", group.busy)
    step("verdict", group.verdict)
    step("give up", lambda: group.give_up(1))
    step("capture", lambda: _cuda.ignore_captures(MINE))
    step("close", group.close)
    step("free", free)
    place = step("reserve", lambda: _cuda.vmm_reserve(MINE, MIB))
    step("unreserve", lambda: _cuda.vmm_unreserve(MINE, place, MIB))
    ptr, handle = step("ipc create", lambda: _cuda.ipc_create(MINE, 4096))
    opened = step("ipc open", lambda: _cuda.ipc_open(MINE, handle))
    step("ipc close", lambda: _cuda.ipc_close(MINE, opened))
    step("ipc destroy", lambda: _cuda.ipc_destroy(MINE, ptr))
    finalisers(step)
    threads_of_nodes(step)
    assert cuda.contexts() == [MINE]


def finalisers(step: Callable[[str, Callable[[], Any]], Any]) -> None:
    """A rank's region is freed by the thread that collects its last tensor."""
    from fastcoll.gpu import regions
    from fastcoll.native import _cuda

    ptr, fd = step("region", lambda: _cuda.vmm_create(MINE, MIB))
    os.close(fd)
    pin = regions.Pin()
    free = partial(_cuda.vmm_close, MINE, ptr, MIB)
    regions._parked.append(regions._Parked(free, [], regions.weakref.ref(pin)))
    pins = [pin]
    del pin
    step("collect", pins.clear)
    assert regions._parked == [], "it was not freed"


def threads_of_nodes(step: Callable[[str, Callable[[], Any]], Any]) -> None:
    """The threads that watch and carry transfers between nodes choose their GPU first."""
    import torch

    from fastcoll.nodes.gpus import captures
    from fastcoll.nodes.transfers.payloads import GpuPayload

    chosen: list[int] = []

    def set_device(device: int) -> None:
        chosen.append(device)

    with mock.patch.object(torch.cuda, "set_device", set_device):
        step("watcher", lambda: captures.enter_thread(MINE))
    assert chosen == [MINE]
    payload = GpuPayload.__new__(GpuPayload)
    payload.device = MINE
    with mock.patch.object(torch.cuda, "device", lambda device: mock.MagicMock()):
        step("transfer between nodes", lambda: payload.here().__enter__())


class Host:
    """One rank of a group, on a device of its own; the ranks are threads that meet."""

    traces = False

    def __init__(self, link: Any, name: str, world_size: int) -> None:
        self.rank, self.world_size, self.name = link.rank, world_size, name
        self.socket_fds, self.exchange_fds = link.socket_fds, link.exchange_fds
        self.gather_bytes = self.gather_words = link.gather

    def check_host(self) -> None:
        """See that the group is well, which it is."""

    def fail(self, kind: int, text: str, ranks: Any) -> None:
        raise AssertionError(text)

    def peer_is_gone(self, peer: int) -> bool:
        return False


GROUPS, WORLD, MOST_MIB = 64, 8, 22


def many_groups(cuda: FakeCuda) -> None:
    """64 groups of 8 ranks, each on its GPU: memory, blocks, and a ring of sends in each group."""
    import torch

    from fastcoll.calls.arrays import view
    from fastcoll.calls.limits import GROUP_LIMIT, GpuLimits
    from fastcoll.calls.transfers import Transfer
    from fastcoll.gpu import group as device_group
    from fastcoll.gpu.residency import residency
    from tests.support.fake_driver import Links, run_ranks

    lines: list[str] = []
    made: list[list[Any]] = [[] for _ in range(WORLD)]
    links = Links(WORLD)

    def send_around(side: Any, number: int, rank: int) -> None:
        given, taken = torch.full((3,), float(100 * number + rank)), torch.zeros(3)
        pairs = (True, given, (rank + 1) % WORLD), (False, taken, (rank - 1) % WORLD)
        side.transfer(
            [Transfer(sends, view(one, ""), peer, 0, GROUP_LIMIT) for sends, one, peer in pairs],
            1.0,
            async_op=False,
        )
        assert taken.tolist() == [100.0 * number + (rank - 1) % WORLD] * 3

    def run(rank: int) -> None:
        link = links.link(rank)
        for number in range(GROUPS):
            host = Host(link, f"group {number}", WORLD)
            limits = GpuLimits(600.0, 30.0)
            side = device_group.DeviceGroup(host, rank, limits, lambda: "")
            made[rank].append(side)
        for number, side in enumerate(made[rank]):
            send_around(side, number, rank)

    with tensors_on_gpu(cuda), mock.patch.object(device_group, "say", lines.append):
        run_ranks(links, run)
        assert cuda.created_bytes() <= GROUPS * WORLD * MOST_MIB * MIB
        assert cuda.created_bytes() >= GROUPS * WORLD * MIB, "memory is not counted"
        assert len([line for line in lines if "shares" in line]) == WORLD, "once for each GPU"
        for rank in range(WORLD):
            assert residency.blocks(rank, 132).is_sharing
            for side in made[rank]:
                side.close()
            assert residency.blocks(rank, 132).free == 132


def growing_heap(cuda: FakeCuda) -> None:
    """No memory before the first symmetric tensor; then arenas that lie behind each other."""
    from fastcoll.calls.limits import GpuLimits
    from fastcoll.gpu import group as device_group
    from fastcoll.gpu import regions
    from tests.support.fake_driver import Links, run_ranks

    devices = [0, 1, 1, 2]  # ranks of one device share addresses
    links = Links(len(devices))
    sizes = [40, 300 * MIB, 1000]  # the second one needs an arena of its own
    told: list[list[int]] = [[] for _ in devices]

    def run(rank: int) -> None:
        host = Host(links.link(rank), "growing", len(devices))
        limits = GpuLimits(600.0, 30.0)
        side = device_group.DeviceGroup(host, devices[rank], limits, lambda: "")
        links.barrier.wait()
        told[rank].append(cuda.created_bytes())
        links.barrier.wait()
        bases = side._copies._ptrs
        blocks = [side._heap.allocate(size) for size in sizes]
        links.barrier.wait()
        told[rank].append(cuda.created_bytes())
        places = [block.ptr - bases[rank] for block in blocks]
        assert places == [0, 256 * MIB, 256], "another arena, or another place in it"
        for block in blocks:
            ctypes.memset(block.ptr, rank + 1, 40)
        links.barrier.wait()
        for peer, base in enumerate(bases):
            for place in places:
                assert ctypes.string_at(base + place, 40) == bytes([peer + 1] * 40)
        links.barrier.wait()
        side.close()

    with tensors_on_gpu(cuda):
        run_ranks(links, run)
    before, after = told[0]
    assert before < 4 * MOST_MIB * MIB
    assert after - before == 4 * (256 + 300) * MIB
    for rank in range(len(devices)):
        links.leave(rank)
    regions.reap()
    assert regions._parked == regions._parked[:0], "regions left behind"
    maps = Path("/proc/self/maps").read_text()
    assert "fake-gpu" not in maps, "memory left mapped"


if __name__ == "__main__":
    run_program(globals())
