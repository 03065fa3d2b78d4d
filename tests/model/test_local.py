# SPDX-License-Identifier: Apache-2.0
"""The parts of a machine, read from a sysfs and an NVML that are made up here."""

import json
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fastcoll.cli import app
from fastcoll_model.machines.described import describe
from fastcoll_model.machines.local import find, parse_cpus
from fastcoll_model.machines.machine import Machine, load_machine, machine_of
from fastcoll_model.placement import best_ring

SWITCH = "00000000:C0:00.0"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def two_sockets(root: Path) -> Path:
    """Write 2 sockets of 4 cores with 2 CPUs each: c and c + 8 are a core; a cache per socket."""
    files = {}
    for cpu in range(16):
        socket, folder = cpu % 8 // 4, f"devices/system/cpu/cpu{cpu}"
        mine = f"{4 * socket}-{4 * socket + 3},{8 + 4 * socket}-{8 + 4 * socket + 3}"
        files |= {
            f"{folder}/topology/thread_siblings_list": f"{cpu % 8},{cpu % 8 + 8}",
            f"{folder}/topology/physical_package_id": f"{socket}",
            f"{folder}/cache/index0/level": "1",
            f"{folder}/cache/index0/shared_cpu_list": f"{cpu % 8},{cpu % 8 + 8}",
            f"{folder}/cache/index3/level": "3",
            f"{folder}/cache/index3/shared_cpu_list": mine,
            f"{folder}/cache/index3/size": "36864K",
        }
    for node in range(2):
        folder = f"devices/system/node/node{node}"
        files[f"{folder}/cpulist"] = f"{4 * node}-{4 * node + 3},{8 + 4 * node}-{8 + 4 * node + 3}"
        files[f"{folder}/distance"] = "10 32" if node == 0 else "32 10"
    files |= {
        "class/net/eth0/speed": "25000",
        "class/net/eth0/device/numa_node": "1",
        "class/net/eth1/speed": "-1",  # no cable
        "class/net/eth1/device/numa_node": "0",
        "class/net/lo/mtu": "65536",
        "class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "class/infiniband/mlx5_0/device/numa_node": "0",
        "class/infiniband/mlx5_0/device/net/ib0/mtu": "2044",
        "class/net/ib0/device/numa_node": "0",  # the same card again
    }
    write(root, files)
    return root


def fake_nvml(links: Any, capability: tuple[int, int] = (9, 0), version: int = 4) -> Any:
    """Eight GPUs: `links(gpu)` are the PCI ids at the ends of its NVLinks; "" is a switch."""

    def state(gpu: int, link: int) -> int:
        if link >= len(links(gpu)):
            raise RuntimeError("Not Supported")
        return 1

    def pci(bus_id: str) -> Any:
        return types.SimpleNamespace(busId=bus_id)

    return types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 8,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda gpu: b"NVIDIA H100",
        nvmlDeviceGetPciInfo=lambda gpu: pci(f"00000000:{gpu + 1:02X}:00.0"),
        nvmlDeviceGetMemoryInfo=lambda gpu: types.SimpleNamespace(total=80 << 30),
        nvmlDeviceGetMaxPcieLinkGeneration=lambda gpu: version + 1,
        nvmlDeviceGetMaxPcieLinkWidth=lambda gpu: 16,
        nvmlDeviceGetCudaComputeCapability=lambda gpu: capability,
        nvmlDeviceGetNvLinkVersion=lambda gpu, link: version,
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda gpu, link: 0 if links(gpu)[link] else 2,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda gpu, link: pci(links(gpu)[link] or SWITCH),
    )


def switched(handle: int) -> list[str]:
    return [""] * 18


# The number of NVLinks between each two GPUs of a DGX-1V.
HYBRID_MESH = {
    0: {1: 1, 2: 1, 3: 2, 4: 2},
    1: {0: 1, 2: 2, 3: 1, 5: 2},
    2: {0: 1, 1: 2, 3: 2, 6: 1},
    3: {0: 2, 1: 1, 2: 2, 7: 1},
    4: {0: 2, 5: 1, 6: 1, 7: 2},
    5: {1: 2, 4: 1, 6: 2, 7: 1},
    6: {2: 1, 4: 1, 5: 2, 7: 2},
    7: {3: 1, 4: 2, 5: 1, 6: 2},
}


def meshed(handle: int) -> list[str]:
    return [
        f"00000000:{there + 1:02X}:00.0"
        for there, count in HYBRID_MESH[handle].items()
        for _ in range(count)
    ]


def machine(root: Path, nvml: Any = False, cpus: Any = range(16)) -> Machine:
    return machine_of(describe(find(cpus, root, nvml)), "here")


def test_cores_caches_nodes_and_cards_are_found(tmp_path: Path) -> None:
    found = find(range(16), two_sockets(tmp_path), False)
    assert [(core.cpu, core.cpus, core.socket, core.node) for core in found.cores] == [
        (cpu, (cpu, cpu + 8), cpu // 4, cpu // 4) for cpu in range(8)
    ]
    assert {core.cache_size for core in found.cores} == {"36864K"}
    assert found.node_distances[0, 1] == 32
    cards = {nic.name: (nic.gbps, nic.node) for nic in found.nics}
    assert cards == {"mlx5_0": (50.0, 0), "eth0": (3.125, 1), "eth1": (0.0, 0)}
    assert not found.problems


def test_the_machine_of_the_cores_is_wired_as_they_are(tmp_path: Path) -> None:
    found = machine(two_sockets(tmp_path))
    assert found.ranks == tuple(f"core{cpu}" for cpu in range(8))
    assert found.way("core0", "core3") == ("core0", "cache0", "core3")
    assert found.way("core0", "core4") == (
        *("core0", "cache0", "node0"),
        *("node1", "cache1", "core4"),
    )
    assert found.wires["node0", "node1"].gbps == 37.5  # 60 GB/s at distance 20; it is 32
    assert found.nics["core0"] == "mlx5_0"
    assert found.nics["core7"] == "eth0"
    pinned = machine(tmp_path, cpus=[1, 9])
    assert pinned.ranks == ("core1",)


def test_gpus_on_a_switch_are_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        {f"bus/pci/devices/0000:{i + 1:02x}:00.0/numa_node": f"{i // 4}" for i in range(8)},
    )
    found = machine(two_sockets(tmp_path), fake_nvml(switched))
    assert found.ranks == tuple(f"gpu{i}" for i in range(8))
    assert found.multicast == "nvswitch"
    assert found.way("gpu0", "gpu7") == ("gpu0", "nvswitch", "gpu7")
    assert found.wires["gpu0", "nvswitch"].gbps == 360.0
    assert (found.nics["gpu0"], found.nics["gpu7"]) == ("mlx5_0", "eth0")
    older = machine(tmp_path, fake_nvml(switched, (8, 0), 3))
    assert not older.multicast


def test_the_rings_of_a_dgx_1v_are_found_on_its_nvlinks(tmp_path: Path) -> None:
    found = machine(two_sockets(tmp_path), fake_nvml(meshed, (7, 0), 2))
    shipped = load_machine("dgx-1v")
    for one in found.ranks:
        for other in found.ranks:
            wires = found.wires.get((one, other)), shipped.wires.get((one, other))
            assert (wires[0] is None) == (wires[1] is None)
            if wires[0] and wires[1]:
                assert wires[0].gbps == wires[1].gbps
    assert best_ring(found)[1] == best_ring(shipped)[1] == 40.0


@pytest.mark.parametrize("name", [name for name in vars(fake_nvml(meshed)) if "Device" in name])
def test_a_driver_that_lacks_something_is_no_end(name: str, tmp_path: Path) -> None:
    def missing(*args: Any) -> None:
        raise RuntimeError("Not Supported")

    nvml = fake_nvml(meshed)
    setattr(nvml, name, missing)
    found = find(range(16), two_sockets(tmp_path), nvml)
    machine_of(describe(found), "here")
    assert len(found.gpus) == (0 if name.endswith(("Count", "ByIndex")) else 8)
    if name.endswith(("Count", "ByIndex", "Name", "GetPciInfo")):
        assert "Not Supported" in " ".join(found.problems)


def test_a_machine_that_tells_nothing_has_a_core(tmp_path: Path) -> None:
    found = machine(tmp_path, cpus=[0])
    assert found.ranks == ("core0",)
    driverless = fake_nvml(switched)
    driverless.nvmlInit = lambda: 1 // 0
    assert "by zero" in find([0], tmp_path, driverless).problems[0]


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_stands_in_the_files_nothing_raises(data: st.DataObject, tmp_path: Path) -> None:
    if not any(tmp_path.iterdir()):
        two_sockets(tmp_path)
    paths = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    numbers = st.integers(-(10**20), 10**20).map(str)
    texts = st.text(st.characters(codec="utf-8"), max_size=8) | numbers | st.just("0-99999999999")
    before = {}
    for path in data.draw(st.lists(st.sampled_from(paths), max_size=6, unique=True)):
        before[path] = path.read_text()
        path.write_text(data.draw(texts))
    machine(tmp_path)
    for path, text in before.items():
        path.write_text(text)


def test_cpu_lists_are_read_as_the_kernel_writes_them() -> None:
    assert parse_cpus("0-2,8,10-11") == (0, 1, 2, 8, 10, 11)
    assert parse_cpus("") == parse_cpus("x-3") == parse_cpus("1-") == ()


def test_this_machine_is_shown_and_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    result = CliRunner().invoke(app, ["topo", "here", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["name"] == "here"
    assert load_machine(str(path)).ranks
    again = CliRunner().invoke(app, ["explain", "all_reduce", "1M", "--topology", str(path)])
    assert again.exit_code == 0, again.output
