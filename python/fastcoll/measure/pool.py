# SPDX-License-Identifier: Apache-2.0
"""The rank processes of one library: start, command, end.

Decides how processes are started (directly, or by an MPI's own mpiexec) and that nothing of them
outlives the measurement. Knows nothing of cells, rounds or tables.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from fastcoll.machine.cpu import affinity
from fastcoll.measure.engines import ENGINES, environment
from fastcoll.measure.library import IN_GRAPH, WorkerConfig
from fastcoll.measure.mpi import MpiInstall
from fastcoll.measure.protocol import Line, Reply

_START_LIMIT_S = 120.0
_REPLY_LIMIT_S = 180.0
# The environment of a library's processes, in a graph or not.
_ENVIRONMENT = {
    # Gloo looks for the address of the host's name, which a container may not know. The ranks of
    # torch's symmetric memory meet through it.
    **dict.fromkeys(
        ("gloo", *ENGINES, "symm_one_shot", "symm_two_shot", "symm_multimem"),
        "GLOO_SOCKET_IFNAME=lo",
    ),
    "nccl_nowin": "NCCL_SYM_NOWIN_ENABLE=1",  # read when NCCL is first used
}


class NotMeasured(Exception):
    """A library cannot be measured here; the text is the reason that the table prints."""


def available_cpus() -> tuple[int, ...]:
    """Return the CPUs that this process may use, ascending."""
    return tuple(sorted(affinity()))


def worker_command(config: WorkerConfig, rank: int) -> list[str]:
    told = {key: value for key, value in asdict(config).items() if key != "rank"}
    module = "fastcoll.measure.worker"
    return [sys.executable, "-m", module, json.dumps(told), str(rank)]


def loop_command(program: Path, config: WorkerConfig, rank: int) -> list[str]:
    cpu = config.cpus[rank] if config.cpus else -1
    return [str(program), config.socket_path, str(rank), str(config.world_size), str(cpu)]


def own_commands(config: WorkerConfig, ranks: Sequence[int]) -> list[list[str]]:
    """Return the commands of a library whose ranks need no launcher."""
    word = _ENVIRONMENT.get(config.library.removesuffix(IN_GRAPH))
    prefix = ["env", word] if word else []
    return [[*prefix, *environment(config, rank), *worker_command(config, rank)] for rank in ranks]


def own_pool(
    library: str, world_size: int, folder: Path, ranks: Sequence[int] | None = None
) -> "Pool":
    """Return ranks of fastcoll's own, each on a core of its own where there are enough.

    Args:
        library: Key of `libraries.LIBRARIES`, or of those on GPUs.
        world_size: How many there are.
        folder: An empty folder for sockets; its path must be short.
        ranks: Those that this process starts; None: all.
    """
    cpus = available_cpus()
    config = WorkerConfig(
        library=library,
        world_size=world_size,
        socket_path=str(folder / f"{world_size}.sock"),
        store_path=str(folder / f"{world_size}.store"),
        cpus=cpus[:world_size] if world_size <= len(cpus) else None,
    )
    commands = own_commands(config, range(world_size) if ranks is None else ranks)
    return Pool("fastcoll", world_size, config.socket_path, commands)


def mpi_commands(
    install: MpiInstall, config: WorkerConfig, program: Path | None
) -> list[list[str]]:
    """Return the one mpiexec command that starts all ranks of an MPI."""
    ranks = range(config.world_size)
    if program is None:
        commands = [worker_command(config, rank) for rank in ranks]
    else:
        commands = [loop_command(program, config, rank) for rank in ranks]
    return [install.launch_command(commands, len(available_cpus()))]


@dataclass
class Pool:
    """All ranks of one library, blocked in a read whenever no command runs.

    A context manager: they run inside of its `with`.
    """

    name: str
    world_size: int
    socket_path: str
    commands: list[list[str]]  # the commands to start, one process each
    version: str = ""  # the library's version, from the ranks
    lines: list[Line] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    listener: socket.socket | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _log_path(self) -> Path:
        return Path(self.socket_path + ".log")

    @property
    def is_running(self) -> bool:
        return bool(self.lines)

    def launch(self) -> None:
        """Start the processes, which several pools may do before any of them is waited for."""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.socket_path)
        self.listener.listen(self.world_size)
        self.listener.settimeout(0.2)
        with self._log_path.open("wb") as log:
            for command in self.commands:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def start(self) -> None:
        """Start the processes, if that is not done, and wait for every rank's greeting.

        Raises:
            NotMeasured: a rank ended, failed, or did not come in time.
        """
        try:
            if self.listener is None:
                self.launch()
            self._meet()
        except BaseException:
            self.close()
            raise

    def _meet(self) -> None:
        assert self.listener is not None  # since the processes were started
        with self.listener as listener:
            try:
                self._accept_all(listener, time.monotonic() + _START_LIMIT_S)
            except NotMeasured as error:
                raise NotMeasured(f"{error}{_find_reason_in_log(self._log_path)}") from None
        greetings = self.gather()
        failed = [reply["error"] for reply in greetings if "error" in reply]
        if failed:
            raise NotMeasured(failed[0])
        self.version = greetings[0]["version"]
        self.pids = [reply["pid"] for reply in greetings if "pid" in reply]

    def _accept_all(self, listener: socket.socket, deadline: float) -> None:
        by_rank: dict[int, Line] = {}
        while len(by_rank) < self.world_size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                # One that has come may have said why it can't be measured, and ended.
                is_launcher = len(self.processes) < self.world_size
                for rank, process in enumerate(self.processes):
                    if process.poll() is not None and (is_launcher or rank not in by_rank):
                        raise NotMeasured("a rank process ended at its start") from None
                if time.monotonic() > deadline:
                    raise NotMeasured(f"no start within {_START_LIMIT_S:.0f} s") from None
                continue
            connection.settimeout(_REPLY_LIMIT_S)
            line = Line(connection)
            by_rank[json.loads(line.receive())["rank"]] = line
        self.lines = [by_rank[rank] for rank in range(self.world_size)]

    def reply_of(self, rank: int) -> Reply:
        """Return the next reply of one rank.

        Raises:
            NotMeasured: the rank is gone or silent.
        """
        try:
            text = self.lines[rank].receive()
        except OSError:
            text = ""
        if not text:
            self.close()
            raise NotMeasured(f"rank {rank} ended, or gave no answer within {_REPLY_LIMIT_S:.0f} s")
        reply: Reply = json.loads(text)
        return reply

    def gather(self) -> list[Reply]:
        """Return one reply of each rank.

        Raises:
            NotMeasured: a rank is gone or silent.
        """
        return [self.reply_of(rank) for rank in range(len(self.lines))]

    def command(self, text: str) -> list[Reply]:
        """Send one command to every rank and return their replies.

        Raises:
            NotMeasured: a rank is gone, silent, or refused (with its reason).
        """
        if not self.lines:
            raise NotMeasured("its processes have ended")
        for line in self.lines:
            with suppress(OSError):
                line.send(text)
        replies = self.gather()
        for reply in replies:
            if "error" in reply:
                raise NotMeasured(reply["error"])
        return replies

    def close(self) -> None:
        """End every process of this pool; those that do not follow are killed."""
        for line in self.lines:
            with suppress(OSError):
                line.send("quit")
                line.close()
        self.lines = []
        if self.listener is not None:
            self.listener.close()
        # Ranks that never came up have nothing to finish.
        limit_s = 5.0 if self.version else 0.1
        for process in self.processes:
            try:
                process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                self._kill(process)
        self.processes = []
        self.pids = []

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """End a process that hangs; an mpiexec ends its ranks itself if it is given the time."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            for pid in self.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _find_reason_in_log(log_path: Path) -> str:
    """Return the line of a process's output that most likely says why it ended."""
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines()]
    spoken = [line for line in lines if any(letter.isalpha() for letter in line)]
    errors = [line for line in spoken if "error" in line.lower()]
    chosen = (errors or spoken)[-1:]
    return f": {chosen[0][:200]}" if chosen else ""
