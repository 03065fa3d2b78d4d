# SPDX-License-Identifier: Apache-2.0
"""The company of bench/company.py: processes beside the ranks, and a limit on the ranks' CPU time.

    python bench/strangers.py hog|engine PARENT_PID

A stranger ends once its parent is gone, whatever ended that.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


def _burn(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def be_hog(parent: int) -> None:
    """Take all of a core that it is given."""
    while os.getppid() == parent:
        _burn(0.01)


def be_engine(parent: int) -> None:
    """Be the engine of a server and its helper: short bursts that wake each other by a socket."""
    ours, theirs = socket.socketpair()
    if helper := os.fork():
        theirs.close()
        while os.getppid() == parent:
            _burn(300e-6)
            ours.send(b"x")
            ours.recv(1)
            time.sleep(300e-6)
        ours.close()
        os.waitpid(helper, 0)
        return
    ours.close()
    with contextlib.suppress(OSError):  # the engine is gone
        while theirs.recv(1):
            _burn(100e-6)
            theirs.send(b"x")


@contextlib.contextmanager
def strangers(kinds: Sequence[str]) -> Iterator[None]:
    """Have a process of each kind run meanwhile."""
    argv = [sys.executable, __file__]
    running = [subprocess.Popen([*argv, kind, str(os.getpid())]) for kind in kinds]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextlib.contextmanager
def quota(share: float) -> Iterator[Path]:
    """Make a control group that has so large a share of all CPUs, and yield its folder.

    Raises:
        OSError: This user may not make one here.
    """
    time_us = int(share * (os.cpu_count() or 1) * _PERIOD_US)
    old = _CGROUPS / "cpu"  # version 1 of control groups has a tree for each resource
    folder = (old if old.is_dir() else _CGROUPS) / f"fastcoll-company-{os.getpid()}"
    folder.mkdir()
    try:
        if old.is_dir():
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(time_us))
        else:
            (folder / "cpu.max").write_text(f"{time_us} {_PERIOD_US}")
        yield folder
    finally:
        folder.rmdir()


if __name__ == "__main__":
    {"hog": be_hog, "engine": be_engine}[sys.argv[1]](int(sys.argv[2]))
