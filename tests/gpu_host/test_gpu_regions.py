# SPDX-License-Identifier: Apache-2.0
"""How ranks come to each other's GPU memory, over a driver made of dictionaries."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from fastcoll.calls.limits import GpuLimits
from fastcoll.errors import UnsupportedError, UsageError
from tests.support.fake_driver import THREE, Driver, Links, map_all, mapped
from tests.support.gpu import needs_gpu_part

pytestmark = needs_gpu_part


@pytest.mark.parametrize(("world_size", "mib"), [(2, 18), (8, 22), (16, 28), (72, 70)])
def test_a_region_has_room_for_its_ranks(world_size: int, mib: int) -> None:
    from fastcoll.native import _cuda

    assert -(-_cuda.region_bytes(32, world_size) // (2 << 20)) * 2 == mib


def test_more_ranks_than_an_nvlink_domain_has_are_refused() -> None:
    from fastcoll.gpu.group import DeviceGroup
    from fastcoll.native import _cuda

    host: Any = SimpleNamespace(world_size=73)
    said = "a group on GPUs has at most 72 ranks, not 73"
    with pytest.raises(UnsupportedError, match=said):
        DeviceGroup(host, 0, GpuLimits(600.0, 30.0), lambda: "")
    with pytest.raises(UsageError, match=said):
        _cuda.Group(0, 0, [0] * 73, 1)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_descriptors_are_the_first_choice(driver: Driver, order: list[int]) -> None:
    with mapped([0, 1, 2], THREE, order) as results:
        for regions, _, reasons in results:
            assert regions.route == "vmm"
            assert reasons == {}
            assert 0 not in regions.ptrs
        assert len({ptr for regions, _, _ in results for ptr in regions.ptrs}) == 9


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
    vars(driver).update(fault)
    with mapped([0, 1, 2], THREE, [1, 2, 0]) as results:
        for regions, _, reasons in results:
            assert regions.route == "ipc"
            assert reason in reasons["vmm"]
        assert len({reasons["vmm"] for _, _, reasons in results}) == 1, "another reason"


def test_where_no_route_works_every_rank_says_why(driver: Driver) -> None:
    driver.refused = {("vmm_open", 0), ("ipc_open", 2)}
    with mapped([0, 1, 2], THREE) as results:
        for error in results:
            assert isinstance(error, UnsupportedError)
            assert "vmm: rank 0: vmm_open refused" in str(error)
            assert "ipc: rank 2: ipc_open refused" in str(error)


@pytest.mark.parametrize(("wish", "starts_early"), [("auto", True), ("never", False)])
def test_kernels_start_early_unless_they_must_not(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, wish: str, starts_early: bool
) -> None:
    monkeypatch.setenv("FASTCOLL_GPU_EARLY_START", wish)
    with mapped([0, 1], THREE[:2]):
        assert driver.early_starts == [starts_early] * 2


def test_exported_memory_is_freed_only_when_the_peers_have_left(driver: Driver) -> None:
    driver.refused = {("vmm_create", 0)}
    links = Links(2)
    results = map_all(links, [0, 1], THREE[:2])
    own = results[0][0].ptrs[0]
    results[0][0].leave()
    links.leave(0)
    assert own in driver.mapped, "rank 1 still has it mapped"
    results[1][0].leave()
    links.leave(1)
    from fastcoll.gpu import regions as device

    device.reap()
    assert own not in driver.mapped


def test_ranks_of_one_process_share_pointers(driver: Driver) -> None:
    from fastcoll.gpu.terms import PROCESS

    links = Links(2)
    results = map_all(links, [0, 0], [PROCESS] * 2)
    assert results[0][0].ptrs == results[1][0].ptrs
    results[0][0].leave()
    links.leave(0)
    assert set(results[1][0].ptrs) <= driver.mapped.keys(), "rank 1 may still use it"
    results[1][0].leave()
    links.leave(1)


def test_one_process_with_two_devices_opens_access_between_them(driver: Driver) -> None:
    from fastcoll.gpu.terms import PROCESS

    driver.refused = {("vmm_create", 0)}
    with mapped([0, 1], [PROCESS] * 2):
        assert driver.peer_access == {(0, 1), (1, 0)}


def test_a_region_lives_as_long_as_its_tensors(driver: Driver) -> None:
    from fastcoll.gpu import regions as device

    links = Links(2)
    results = map_all(links, [0, 1], THREE[:2])
    own = results[0][0].ptrs[0]
    pin = device.Pin()
    results[0][0].leave(weakref.ref(pin))
    results[1][0].leave()
    assert own in driver.mapped, "a tensor may still lie in it"
    del pin
    assert own not in driver.mapped
    for rank in range(2):
        links.leave(rank)
