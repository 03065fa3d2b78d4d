# SPDX-License-Identifier: Apache-2.0
"""Memory for symmetric tensors on GPUs: taken by all ranks or by none, over a made-up driver."""

from typing import Any

import pytest

from fastcoll.errors import DriverError
from tests.support.fake_driver import THREE, Driver, Links, map_all, run_ranks
from tests.support.gpu import needs_gpu_part

pytestmark = needs_gpu_part

MIB = 1 << 20
SIZE = 256 * MIB


def grow(
    links: Links, results: list[Any], sizes: list[int]
) -> tuple[list[Any], list[list[int | str]]]:
    """Let every rank take arenas; return the ranks' heaps, and the addresses or errors of each."""
    from fastcoll.gpu.heap import DeviceHeap

    heaps: list[Any] = [None] * len(results)
    found: list[list[int | str]] = [[] for _ in results]

    def run(rank: int) -> None:
        regions, core, _ = results[rank]
        heaps[rank] = DeviceHeap(regions, core, regions.link.gather)
        for size in sizes:
            try:
                found[rank].append(heaps[rank].add_shared_arena(size))
            except DriverError as error:
                found[rank].append(str(error))

    run_ranks(links, run)
    return heaps, found


def take(
    driver: Driver, sizes: list[int], processes: list[str] = THREE, devices: list[int] | None = None
) -> list[list[int | str]]:
    """Map regions of three ranks, grow their heaps, check them and take all down."""
    from fastcoll.gpu import regions as device

    places = devices or [0, 1, 2]
    links = Links(3)
    results = map_all(links, places, processes)
    heaps, found = grow(links, results, sizes)
    for rank, (regions, core, _) in enumerate(results):
        bases, num_bytes = heaps[rank].bases, heaps[rank].num_bytes
        assert core.heap is None or core.heap[:2] == (bases, num_bytes)
        start = 0
        for arena in regions.arenas:
            for peer, ptr in enumerate(arena.ptrs):
                assert ptr == bases[peer] + start, "not behind the one before"
                theirs = results[peer][0].arenas[regions.arenas.index(arena)].ptrs[peer]
                assert driver.mapped[ptr] is driver.mapped[theirs], "another memory"
            start += arena.num_bytes
        assert start == num_bytes
    for rank in range(3):
        results[rank][0].leave()
        links.leave(rank)
    device.reap()
    return found


@pytest.mark.parametrize("devices", [[0, 1, 2], [0, 0, 1]])
@pytest.mark.parametrize("processes", [THREE, ["one"] * 3])
def test_arenas_of_all_ranks_lie_behind_each_other(
    driver: Driver, processes: list[str], devices: list[int]
) -> None:
    for one, other, third in take(driver, [SIZE, SIZE, 2 * SIZE], processes, devices):
        assert isinstance(one, int)
        assert (other, third) == (one + SIZE, one + 2 * SIZE)


@pytest.mark.parametrize("refused", [("vmm_reserve", 1), ("vmm_create", 2), ("vmm_open", 0)])
def test_what_one_rank_can_not_take_no_rank_takes(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, refused: tuple[str, int]
) -> None:
    from fastcoll.gpu import heap

    place = heap.DeviceHeap.add_shared_arena

    def add(self: Any, size: int) -> int:
        if size == SIZE + 1:  # from here on, after the regions
            driver.refused.add(refused)
        try:
            return place(self, size)
        finally:
            driver.refused.discard(refused)

    monkeypatch.setattr(heap.DeviceHeap, "add_shared_arena", add)
    rows = take(driver, [SIZE + 1, SIZE])
    assert len({row[0] for row in rows}) == 1, "another reason"
    name, device = refused
    assert f"no room for 256 MiB of symmetric tensors: rank {device}: {name} refused" in rows[0][0]
    assert all(isinstance(row[1], int) for row in rows), "the heap can still grow"


def test_memory_that_can_not_be_placed_grows_once(driver: Driver) -> None:
    driver.refused = {("vmm_create", 1)}
    for one, other in take(driver, [SIZE, SIZE]):
        assert isinstance(one, int)
        assert "FASTCOLL_GPU_HEAP_MIB" in str(other)


def test_a_heap_has_an_end(driver: Driver) -> None:
    for one, other in take(driver, [SIZE, 64 << 30]):
        assert isinstance(one, int)
        assert "no room for 65536 MiB more" in str(other)


@pytest.mark.parametrize("refused", [None, ("multicast_bind", 1)])
def test_arenas_come_behind_the_switch_or_none_does(
    driver: Driver, refused: tuple[str, int] | None
) -> None:
    links = Links(3)
    results = map_all(links, [0, 1, 2], THREE)
    assert all(regions.multicast is not None for regions, _, _ in results)
    if refused:
        driver.refused.add(refused)
    grow(links, results, [SIZE, SIZE])
    commons = [core.heap[2] for _, core, _ in results]
    assert all(commons) if refused is None else not any(commons)
    for regions, _, _ in results:
        assert [arena.multicast is None for arena in regions.arenas] == [bool(refused)] * 2
        if refused is None:
            first, second = (arena.multicast.ptr for arena in regions.arenas)
            assert second == first + SIZE
    for rank in range(3):
        results[rank][0].leave()
        links.leave(rank)
