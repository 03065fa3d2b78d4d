# SPDX-License-Identifier: Apache-2.0
"""The parts of this machine: cores, caches, NUMA nodes, network cards, GPUs and NVLinks.

Reads sysfs and NVML and never raises: parts that can't be read are left out, and the result says
so. Knows nothing of ranks, nor of bandwidths: those are described.py's matter.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

SYSFS = Path("/sys")
T = TypeVar("T")


@dataclass(frozen=True)
class Core:
    """One physical core that this process may use.

    Attributes:
        cpu: Its first CPU, as the kernel numbers them; `cpus` are all of them (SMT).
        cache: The CPUs that share its last cache, as the kernel lists them; with the cache's size.
    """

    cpu: int
    cpus: tuple[int, ...]
    socket: int
    node: int
    cache: str
    cache_size: str


@dataclass(frozen=True)
class Nic:
    """One network card. `gbps`: 10^9 bytes a second; 0 if the card does not say (no link)."""

    name: str
    kind: str
    gbps: float
    node: int


@dataclass(frozen=True)
class LocalGpu:
    """One GPU.

    Attributes:
        pcie_gbps: 10^9 bytes a second of its PCIe slot, each way.
        nvlinks: For each other GPU, or "nvswitch", how many NVLinks lead there.
        nvlink_version: 0 without NVLinks.
        capability: 90 for sm_90.
    """

    index: int
    name: str
    pci_id: str
    node: int
    memory_bytes: int
    pcie_gbps: float
    capability: int
    nvlink_version: int = 0
    nvlinks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Local:
    """All parts that were found, and the problems with the others."""

    cores: tuple[Core, ...]
    node_distances: dict[tuple[int, int], int]
    nics: tuple[Nic, ...]
    gpus: tuple[LocalGpu, ...]
    memory_bytes: int
    problems: tuple[str, ...]


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list as the kernel writes it, "0-3,8"; nothing of one that is broken."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return ()
        if int(last or first) - int(first) > 1 << 16:
            return ()
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path, default: int) -> int:
    text = _read(path)
    return int(text) if text.lstrip("-").isdecimal() else default


def _entries(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _cores(sysfs: Path, usable: Iterable[int]) -> list[Core]:
    nodes = {
        cpu: int(path.name[4:])
        for path in _entries(sysfs / "devices/system/node", "node[0-9]*")
        if path.name[4:].isdecimal()
        for cpu in parse_cpus(_read(path / "cpulist"))
    }
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(usable):
        folder = sysfs / f"devices/system/cpu/cpu{cpu}"
        siblings = parse_cpus(_read(folder / "topology/thread_siblings_list")) or (cpu,)
        if siblings in cores:
            continue
        caches = [
            (_number(path / "level", 0), _read(path / "shared_cpu_list"), _read(path / "size"))
            for path in _entries(folder / "cache", "index[0-9]*")
        ]
        _, cache, cache_size = max(caches, default=(0, "", ""))
        socket = max(0, _number(folder / "topology/physical_package_id", 0))
        cores[siblings] = Core(cpu, siblings, socket, nodes.get(cpu, 0), cache, cache_size)
    return list(cores.values())


def _distances(sysfs: Path) -> dict[tuple[int, int], int]:
    rows = {}
    for path in _entries(sysfs / "devices/system/node", "node[0-9]*"):
        if path.name[4:].isdecimal():
            words = _read(path / "distance").split()
            rows[int(path.name[4:])] = [int(word) for word in words if word.isdecimal()]
    nodes = sorted(rows)
    # The kernel leaves out nodes that are not online: the i-th number is the i-th node's.
    return {
        (one, other): far for one in nodes for other, far in zip(nodes, rows[one], strict=False)
    }


def _nics(sysfs: Path) -> list[Nic]:
    nics = []
    for path in _entries(sysfs / "class/infiniband", "*"):
        rates = [_read(port / "rate").partition(" ")[0] for port in _entries(path / "ports", "*")]
        bits = [float(rate) for rate in rates if rate.replace(".", "", 1).isdecimal()]
        node = max(0, _number(path / "device/numa_node", 0))
        nics.append(Nic(path.name, "InfiniBand or RoCE", sum(bits) / 8, node))
    of_these = {
        entry.name
        for path in _entries(sysfs / "class/infiniband", "*")
        for entry in _entries(path / "device/net", "*")
    }
    for path in _entries(sysfs / "class/net", "*"):
        if path.name in of_these or not (path / "device").exists():  # loopback, bridges, tunnels
            continue
        megabits = max(0, _number(path / "speed", 0))
        node = max(0, _number(path / "device/numa_node", 0))
        nics.append(Nic(path.name, "Ethernet", megabits / 8e3, node))
    return nics


# Lanes carry 8b/10b up to generation 2, 128b/130b after it; 10^9 bytes a second.
_PCIE_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_NVLINKS = 18  # the most of any GPU so far
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class _Nvml:
    """NVML, asked one question at a time: a driver may lack any of them."""

    def __init__(self, nvml: Any, problems: list[str]) -> None:
        self._nvml = nvml
        self._problems = problems

    def ask(self, what: str, question: Callable[[Any], T], default: T) -> T:
        """Return the answer; the default, and a problem noted, if there is none."""
        try:
            return question(self._nvml)
        except Exception as error:
            self._problems.append(f"{what}: {error}")
            return default

    def ask_or(self, question: Callable[[Any], T], default: T) -> T:
        """Return the answer, or the default without a note: for parts that many machines lack."""
        try:
            return question(self._nvml)
        except Exception:
            return default


def _gpus(sysfs: Path, nvml: Any, problems: list[str]) -> list[LocalGpu]:
    asked = _Nvml(nvml, problems)
    if not asked.ask("NVML", lambda n: (n.nvmlInit(), True)[1], False):
        return []
    count = asked.ask("NVML: number of GPUs", lambda n: int(n.nvmlDeviceGetCount()), 0)
    found = [_gpu(asked, sysfs, index) for index in range(count)]
    by_pci = {gpu.pci_id: f"gpu{gpu.index}" for gpu in found if gpu is not None}
    for gpu in found:
        if gpu is not None:
            _add_nvlinks(asked, gpu, by_pci)
    return [gpu for gpu in found if gpu is not None]


def _gpu(asked: _Nvml, sysfs: Path, index: int) -> LocalGpu | None:
    handle = asked.ask(f"gpu{index}", lambda n: n.nvmlDeviceGetHandleByIndex(index), None)
    if handle is None:
        return None
    name = f"gpu{index}"
    pci_id = asked.ask(f"{name}: PCI", lambda n: _text(n.nvmlDeviceGetPciInfo(handle).busId), "")
    generation = asked.ask_or(lambda n: int(n.nvmlDeviceGetMaxPcieLinkGeneration(handle)), 0)
    width = asked.ask_or(lambda n: int(n.nvmlDeviceGetMaxPcieLinkWidth(handle)), 0)
    major, minor = asked.ask_or(lambda n: n.nvmlDeviceGetCudaComputeCapability(handle), (0, 0))
    # sysfs writes the domain with 4 digits, NVML with 8.
    folder = sysfs / "bus/pci/devices" / pci_id.lower()[-12:]
    return LocalGpu(
        index=index,
        name=asked.ask(f"{name}: name", lambda n: _text(n.nvmlDeviceGetName(handle)), "GPU"),
        pci_id=pci_id.lower(),
        node=max(0, _number(folder / "numa_node", 0)),
        memory_bytes=asked.ask_or(lambda n: int(n.nvmlDeviceGetMemoryInfo(handle).total), 0),
        pcie_gbps=_PCIE_LANE_GBPS.get(generation, 0.0) * width,
        capability=10 * int(major) + int(minor),
        nvlink_version=asked.ask_or(lambda n: int(n.nvmlDeviceGetNvLinkVersion(handle, 0)), 0),
    )


def _add_nvlinks(asked: _Nvml, gpu: LocalGpu, by_pci: dict[str, str]) -> None:
    handle = asked.ask_or(lambda n: n.nvmlDeviceGetHandleByIndex(gpu.index), None)
    for link in range(_NVLINKS):
        is_active = asked.ask_or(
            lambda n, link=link: bool(n.nvmlDeviceGetNvLinkState(handle, link)),  # type: ignore[misc]
            False,
        )
        if not is_active:
            continue
        kind = asked.ask_or(
            lambda n, link=link: int(n.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)),  # type: ignore[misc]
            -1,
        )
        remote = asked.ask_or(
            lambda n, link=link: _text(n.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId),  # type: ignore[misc]
            "",
        )
        there = by_pci.get(remote.lower(), "nvswitch" if kind == _SWITCH else "")
        if there:
            gpu.nvlinks[there] = gpu.nvlinks.get(there, 0) + 1


def find(usable_cpus: Iterable[int], sysfs: Path = SYSFS, nvml: Any = None) -> Local:
    """Return the parts of this machine; never raises.

    Args:
        usable_cpus: The CPUs to look at.
        sysfs: Where sysfs is mounted.
        nvml: The module `pynvml`; None imports it, if it is installed.
    """
    problems: list[str] = []
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            problems.append("GPUs: pynvml is not installed (pip install nvidia-ml-py)")
    return Local(
        cores=tuple(_guarded("cores", lambda: _cores(sysfs, usable_cpus), [], problems)),
        node_distances=_guarded("NUMA nodes", lambda: _distances(sysfs), {}, problems),
        nics=tuple(_guarded("network cards", lambda: _nics(sysfs), [], problems)),
        gpus=tuple(
            _guarded("GPUs", lambda: _gpus(sysfs, nvml, problems) if nvml else [], [], problems)
        ),
        memory_bytes=_guarded(
            "memory", lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0, problems
        ),
        problems=tuple(problems),
    )


def _guarded(what: str, find: Callable[[], T], default: T, problems: list[str]) -> T:
    try:
        return find()
    except Exception as error:
        problems.append(f"{what}: {error}")
        return default
