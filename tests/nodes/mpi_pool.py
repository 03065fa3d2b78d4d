# SPDX-License-Identifier: Apache-2.0
"""Ranks that an MPI's mpiexec starts, used like those of harness.Pool."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastcoll.measure.mpi import MpiInstall, default_mpi_dir, find_mpi, has_mpi4py
from tests.support.harness import Pool, Setup, rank_main

_START_S = 60.0


def find_open_mpi() -> MpiInstall | None:
    install = find_mpi("openmpi", default_mpi_dir())
    return install if install and has_mpi4py(install) else None


def require_open_mpi() -> MpiInstall:
    """Return the Open MPI; without one the test is skipped, and fails in CI."""
    install = find_open_mpi()
    if install is None:
        skip = pytest.fail if os.environ.get("CI") else pytest.skip
        skip("no Open MPI with mpi4py: bench/setup_mpi.sh, or fastcoll[openmpi]")
    return install


class _Rank:
    """A process that is mpiexec's child, with what a pool asks of a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)

    @property
    def exitcode(self) -> int | None:
        """Unknown but for its being there; mpiexec reaps it."""
        return None if self._process.is_running() else -1

    def join(self, limit_s: float) -> None:
        with contextlib.suppress(psutil.TimeoutExpired):
            self._process.wait(limit_s)

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()


class MpiPool(Pool):
    """Ranks with mpi4py in them, over "mpi" between their nodes."""

    def __init__(self, install: MpiInstall, world_size: int, setup: Setup) -> None:
        self._install = install
        self._mpiexec: subprocess.Popen[bytes] | None = None
        # Of its daemons: one that is killed leaves it to others to clean up.
        self._session = tempfile.TemporaryDirectory(
            prefix="fastcoll-mpi-", ignore_cleanup_errors=True
        )
        self.is_open = False
        try:
            super().__init__(world_size, setup)
        except BaseException:
            self.close(grace_s=0.2)
            raise

    def start_ranks(self, arguments: Sequence[tuple[Any, ...]]) -> None:
        program = [
            sys.executable,
            "-c",
            "from tests.nodes import mpi_pool; mpi_pool.be_rank()",
        ]
        found: dict[int, tuple[Connection, _Rank]] = {}
        with (
            tempfile.TemporaryDirectory(prefix="fastcoll-mpi-") as folder,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            address = str(Path(folder, "pool"))
            listener.bind(address)
            listener.listen(len(arguments))
            listener.settimeout(_START_S)
            self._mpiexec = self.launch([*program, address])
            for _ in arguments:
                conn = Connection(listener.accept()[0].detach())
                rank, pid = conn.recv()
                found[rank] = conn, _Rank(pid)
        for rank, rank_arguments in enumerate(arguments):
            conn, process = found[rank]
            conn.send(rank_arguments)
            self._conns.append(conn)
            self.processes.append(process)

    def launch(self, program: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start the ranks: a program on each."""
        return self.start_mpiexec(self._install.launch_command([[*program]] * self.world_size, 1))

    def start_mpiexec(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start a command with what its ranks import."""
        paths = [*sys.path, str(self._install.site_packages)]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": self._session.name,
        }
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)

    def close(self, grace_s: float = 5.0) -> None:
        super().close(grace_s)
        if self._mpiexec is not None:
            try:
                self._mpiexec.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._mpiexec.kill()
                self._mpiexec.wait()
        self._session.cleanup()


def be_rank() -> None:
    """Run on a rank; the last word of its command line is where the pool listens."""
    from mpi4py import MPI

    with socket.socket(socket.AF_UNIX) as client:
        client.connect(sys.argv[-1])
        conn = Connection(client.detach())
    conn.send((MPI.COMM_WORLD.Get_rank(), os.getpid()))
    rank_main(conn, *conn.recv())
