# SPDX-License-Identifier: Apache-2.0
"""The CPUs that this process can see: how many, which NUMA nodes, which caches.

Reads the scheduler and sysfs and never raises: unreadable facts are left out. Knows nothing of
ranks.
"""

import math
import os
import platform
import re
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CPUINFO = Path("/proc/cpuinfo")


def read_text(path: Path) -> str:
    """Return the text of a file without white space around it; empty if it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cpu_quota() -> int:
    """Return how many CPUs this process's cgroup may keep busy; all of them without a quota."""
    quota, _, period = read_text(_QUOTA).partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return max(1, math.ceil(int(quota) / int(period)))
    return os.cpu_count() or 1


def affinity() -> set[int]:
    """Return the CPUs this process may run on; all of them where the kernel may not be asked."""
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return set(range(os.cpu_count() or 1))


def usable_cpus() -> int:
    """Return how many CPUs this process may keep busy: its affinity, cut by a cgroup quota."""
    return min(len(affinity()), cpu_quota())


def numa_nodes() -> dict[int, str]:
    """Return the CPU list of each NUMA node, as the kernel writes it ("0-3,8-11")."""
    return {
        int(path.name[4:]): read_text(path / "cpulist")
        for path in sorted(_NODES.glob("node[0-9]*"))
        if path.name[4:].isdigit()
    }


def cores(cpus: set[int]) -> list[tuple[int, ...]]:
    """Return the cores of these CPUs, each as those of its CPUs; neighbours in memory adjoin."""
    node_of = {cpu: node for node, text in numa_nodes().items() for cpu in _cpus_in(text)}
    found: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        siblings = read_text(_CPUS / f"cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(siblings or str(cpu), []).append(cpu)
    return [
        tuple(core) for core in sorted(found.values(), key=lambda core: node_of.get(core[0], 0))
    ]


def _cpus_in(text: str) -> list[int]:
    """Return the CPUs of a list as the kernel writes it."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",") if part]
    return [cpu for end in ends for cpu in range(end[0], end[-1] + 1)]


def cache_sizes() -> dict[str, str]:
    """Return the caches of one usable CPU: {"L1 Data": "32K", "L2 Unified": "2048K", ...}."""
    cpu = min(affinity())
    sizes = {}
    for path in sorted(_CPUS.glob(f"cpu{cpu}/cache/index[0-9]*")):
        level, kind, size = (read_text(path / name) for name in ("level", "type", "size"))
        if level and size:
            sizes[f"L{level} {kind}"] = size
    return sizes


def vendor() -> str:
    """Return the CPU's vendor ("GenuineIntel", "AuthenticAMD"), or an empty string."""
    return _cpuinfo().get("vendor_id", "")


def cpu_model() -> str:
    """Return the CPU's name, with family and model where the name says little (as VMs' do)."""
    fields = _cpuinfo()
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']} model {fields.get('model', '?')})"
    return str(name)


@cache
def _cpuinfo() -> dict[str, str]:
    """Return what the kernel says of the first CPU.

    Each group asks, and for all CPUs of a server the kernel takes milliseconds.
    """
    rows: list[str] = []
    with suppress(OSError), _CPUINFO.open() as lines:
        rows.extend(takewhile(str.strip, lines))
    return dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", "".join(rows), re.M))


def fingerprint() -> dict[str, object]:
    """Return the facts that must be equal for measurements of one machine to hold on another."""
    return {
        "cpu_model": cpu_model(),
        "architecture": platform.machine(),
        "num_cpus": os.cpu_count() or 1,
        "num_numa_nodes": len(numa_nodes()) or 1,
        "caches": cache_sizes(),
    }
