# SPDX-License-Identifier: Apache-2.0
"""The machine, code and versions of a measurement.

Decides which facts go into a result file. No absolute path goes in: result files are committed.
"""

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from fastcoll.machine.cpu import cache_sizes, cpu_model, numa_nodes, read_text, usable_cpus


@dataclass(frozen=True)
class Machine:
    """The machine, as far as it matters for memory and signals between processes."""

    cpu_model: str
    num_cpus: int
    num_usable_cpus: int
    num_numa_nodes: int
    caches: dict[str, str]
    memory_gib: float
    kernel: str
    libc: str
    virtualised: bool
    transparent_huge_pages: str
    shmem_huge_pages: str


@dataclass(frozen=True)
class Commit:
    """The source a measurement was made with."""

    hash: str
    dirty: bool


def _chosen(text: str) -> str:
    """Return the bracketed word of a kernel setting such as "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else text or "unknown"


def read_machine() -> Machine:
    huge = Path("/sys/kernel/mm/transparent_hugepage")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu_model=cpu_model(),
        num_cpus=os.cpu_count() or 0,
        num_usable_cpus=usable_cpus(),
        num_numa_nodes=len(numa_nodes()) or 1,
        caches=cache_sizes(),
        memory_gib=round(pages / 2**30, 1),
        kernel=platform.release(),
        libc=" ".join(platform.libc_ver()),
        virtualised=bool(
            re.search(r"^flags.*\bhypervisor\b", read_text(Path("/proc/cpuinfo")), re.M)
        ),
        transparent_huge_pages=_chosen(read_text(huge / "enabled")),
        shmem_huge_pages=_chosen(read_text(huge / "shmem_enabled")),
    )


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def read_commit(*folders: Path) -> Commit | None:
    """Return the commit of the first of `folders` that lies in a checkout of fastcoll."""
    for folder in folders:
        top = _git(folder, "rev-parse", "--show-toplevel")
        head = _git(folder, "rev-parse", "HEAD")
        if top is None or head is None or not (Path(top) / "python" / "fastcoll").is_dir():
            continue
        # Results themselves may be new: they do not change the measured code.
        kept = ("--", ":/", ":(top,exclude)bench/results")
        return Commit(head, bool(_git(folder, "status", "--porcelain", *kept)))
    return None


def read_versions(names: tuple[str, ...] = ("fastcoll", "torch", "numpy")) -> dict[str, str]:
    """Return the versions of Python and of the packages among `names` that are installed."""
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def load_average() -> float:
    """Return how many processes wanted a CPU over the last minute."""
    return round(os.getloadavg()[0], 2)
