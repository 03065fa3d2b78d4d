# SPDX-License-Identifier: Apache-2.0
"""This rank's place, by the variables of torchrun, mpirun or srun.

Decides which launcher is believed, and where the ranks meet if it does not say. Ranks of one
machine then meet at a port that follows from their job, as a file could be one of an earlier job.
Reads a mapping, which fastcoll.env gives it.
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastcoll.errors import UsageError

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
# Others that a rank may have, and that say too little alone.
_HINTS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_HERE = "127.0.0.1"
_MOST_PORT = 65535
# Below the ports that Linux gives to connections.
_FIRST_PORT, _NUM_PORTS = 20000, 12768


@dataclass(frozen=True)
class Launch:
    """A rank's place, and where its peers meet."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    restart_count: int = 0
    # Whether torchrun's agent serves the store at the master's address; else rank 0 does.
    agent_serves: bool = False
    job: str = ""  # where the port was chosen here, the job that it was chosen for; else ""


@dataclass(frozen=True)
class _Launcher:
    """The names under which a launcher of MPI's kind tells a rank its place."""

    name: str
    rank: str
    size: str
    local_size: str


_MPIS = (
    _Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the place that the variables give this process; None if it was not launched as a rank.

    Raises:
        UsageError: Some of the variables are there but do not make sense, or ranks on several
            machines are not told where to meet.
    """
    if all(name in environ for name in TORCHRUN):
        return _checked(
            Launch(
                rank=_number(environ, "RANK"),
                world_size=_number(environ, "WORLD_SIZE"),
                master_addr=environ["MASTER_ADDR"],
                master_port=_number(environ, "MASTER_PORT"),
                restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT", "0"),
                agent_serves=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            ),
            "RANK",
        )
    for one in _MPIS:
        if one.rank in environ and one.size in environ and one.local_size in environ:
            return _of_mpi(environ, one)
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return _of_srun(environ)
    return None


def explain_no_launch(environ: Mapping[str, str]) -> str:
    """Return which variables are there of a launcher that did not say enough; "" without any."""
    if "RANK" in environ:
        missing = [name for name in TORCHRUN if name not in environ]
        there = [name for name in TORCHRUN if name in environ]
        return (
            f"{_listed(there)} set, but {_listed(missing)} not: with "
            f"{'it' if len(missing) == 1 else 'them'} this process would know its peers"
        )
    if hint := next((name for name in _HINTS if name in environ), None):
        return (
            f"{hint}={environ[hint]} is set, but nothing tells how many ranks there are, or where"
        )
    return ""


def _listed(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _of_mpi(environ: Mapping[str, str], one: _Launcher) -> Launch:
    """Return the place of a rank of an MPI; its launcher says whether all are on one machine."""
    rank, world_size = _number(environ, one.rank), _number(environ, one.size)
    is_here = _number(environ, one.local_size) == world_size
    if not is_here and "MASTER_ADDR" not in environ:
        raise UsageError(
            f"rank {rank} of {world_size}, started by {one.name} on several machines: set "
            "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on all ranks"
        )
    return _meeting(environ, (one.rank, rank, world_size), _HERE, _job_above(one.rank))


def _of_srun(environ: Mapping[str, str]) -> Launch:
    """Return the place of a task of a step: rank 0 is on the first of the step's nodes."""
    size = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ), "")
    place = "SLURM_PROCID", _number(environ, "SLURM_PROCID"), _number(environ, size, "1")
    is_here = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) == "1"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or _HERE
    job = f"slurm-{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    return _meeting(environ, place, _HERE if is_here else first_host(nodes), job)


def _meeting(
    environ: Mapping[str, str], place: tuple[str, int, int], host: str, job: str
) -> Launch:
    name, rank, world_size = place
    port = _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
    is_told = "MASTER_ADDR" in environ and "MASTER_PORT" in environ
    launch = Launch(
        rank,
        world_size,
        environ.get("MASTER_ADDR", host),
        _number(environ, "MASTER_PORT", str(port)),
        job="" if is_told else job,
    )
    return _checked(launch, name)


def first_host(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it: gpu[03-07,9],login gives gpu03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else "")


def _job_above(variable: str) -> str:
    """Return the nearest process above that is no rank, which all ranks of this machine share.

    Launchers tell their ranks no name of the job; a shell may stand between them and a rank.
    """
    pid = os.getpid()
    while True:
        parent, _ = _ancestry(pid)
        try:
            environ = Path(f"/proc/{parent}/environ").read_bytes()
        except OSError:  # another user's
            environ = b""
        if f"{variable}=".encode() not in environ:
            return f"{parent}-{_ancestry(parent)[1]}"
        pid = parent


def _ancestry(pid: int) -> tuple[int, str]:
    """Return a process's parent, and when it was started."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[1]), fields[19]


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(
            f"the launcher's environment is broken: {name}={text!r} must be a whole number"
        ) from None


def _checked(launch: Launch, name: str) -> Launch:
    if not 0 <= launch.master_port <= _MOST_PORT:
        raise UsageError(
            f"the launcher's environment is broken: MASTER_PORT={launch.master_port} is outside 0 "
            f"to {_MOST_PORT}"
        )
    if not 0 <= launch.rank < launch.world_size:
        size = "WORLD_SIZE" if name == "RANK" else "the number of ranks"
        raise UsageError(f"{name}={launch.rank} is outside {size}={launch.world_size}")
    return launch
