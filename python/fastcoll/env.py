# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that fastcoll reads, with its default and its help.

Decides how a setting is spelled and parsed. The only module that touches os.environ; values
are read when a group is made, never cached. Knows nothing of groups.
"""

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from fastcoll import launchers
from fastcoll.errors import UsageError
from fastcoll.launchers import Launch, find_launch

T = TypeVar("T")


VARIABLES: list["Variable[Any]"] = []


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One FASTCOLL_* variable; making one adds it to VARIABLES."""

    name: str
    default: T
    help: str
    parse: Callable[[str], T]

    def __post_init__(self) -> None:
        VARIABLES.append(self)

    def get(self) -> T:
        """Return the value in force.

        Raises:
            UsageError: The text in the environment does not parse.
        """
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise UsageError(f"{self.name}={text!r}: {error} ({self.help})") from None

    def is_set(self) -> bool:
        """Return whether the environment sets it."""
        return bool(os.environ.get(self.name, "").strip())


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError("must be a positive number of seconds")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("must be a whole number")
    return int(text)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def _one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"must be one of {', '.join(values)}")
        return text

    return parse


TIMEOUT_S = Variable(
    "FASTCOLL_TIMEOUT_S", 30.0, "limit of every wait, in seconds, unless a call says more", _seconds
)
GPU_TIMEOUT_S = Variable(
    "FASTCOLL_GPU_TIMEOUT_S",
    600.0,
    "limit of every wait in a kernel, in seconds, unless init(), a call or FASTCOLL_TIMEOUT_S says "
    "otherwise; the same on all ranks",
    _seconds,
)
GPU_REPORT_S = Variable(
    "FASTCOLL_GPU_REPORT_S",
    30.0,
    "after such a wait in a kernel, in seconds, the late rank is logged",
    _seconds,
)
NUMERICS = Variable(
    "FASTCOLL_NUMERICS",
    "same_bits",
    "same_bits: float reductions depend on inputs and rank order only; fast: any order; unset, "
    "groups of torch.distributed are fast on GPUs",
    _one_of("same_bits", "fast"),
)
LOG = Variable(
    "FASTCOLL_LOG",
    "",
    'plan: rank 0 logs each choice of an algorithm, at level DEBUG of the logger "fastcoll", which '
    "is stderr unless the program configures logging; many sizes may have one",
    _one_of("plan"),
)
FUSE = Variable(
    "FASTCOLL_FUSE",
    False,
    "read where fastcoll is imported: 1 lets torch.compile fuse all_reduce, the addition of a "
    "residual and RMSNorm, as fastcoll.fuse_compiled() does; default: 0",
    _switch,
)
SINGLE_COPY = Variable(
    "FASTCOLL_SINGLE_COPY",
    "auto",
    "copies out of a peer's private memory: auto where they cost less and ptrace rules allow them, "
    "never, or always for large messages where allowed; the same on all ranks",
    _one_of("auto", "never", "always"),
)
SIMD = Variable(
    "FASTCOLL_SIMD",
    "",
    "instruction set of the reductions; default: the best one this CPU has",
    str,
)
CUDA = Variable(
    "FASTCOLL_CUDA",
    "auto",
    "read when fastcoll is built: auto has GPU support where nvcc is, 0 never, 1 or fail",
    _one_of("auto", "0", "1"),
)
CUDA_ARCHS = Variable(
    "FASTCOLL_CUDA_ARCHS",
    "80,90,100",
    "read when fastcoll is built: the GPUs that it has machine code for; newer ones get the last's",
    str,
)
GPU_CHANNELS = Variable(
    "FASTCOLL_GPU_CHANNELS",
    0,
    "the most thread blocks of a collective on a GPU; 0: up to 32 and half of those that are free",
    _count,
)
GPU_HEAP_MIB = Variable(
    "FASTCOLL_GPU_HEAP_MIB",
    256,
    "by how much each GPU rank's memory for symmetric tensors grows, in MiB, from a group's first "
    "fastcoll.empty() on; more if a tensor needs it. Memory by IPC does not grow again",
    _count,
)
GPU_MULTICAST = Variable(
    "FASTCOLL_GPU_MULTICAST",
    "auto",
    "reductions by the GPUs' switch (multimem): auto where all ranks can have them, or never; one "
    "rank's never is everybody's",
    _one_of("auto", "never"),
)
GPU_EARLY_START = Variable(
    "FASTCOLL_GPU_EARLY_START",
    "auto",
    "kernels start before the one before them in their stream is over, and wait for its end "
    "themselves: auto from Hopper on, or never; ranks may differ",
    _one_of("auto", "never"),
)
OPENMP_WAITS = Variable(
    "FASTCOLL_OPENMP_WAITS",
    "short",
    "where ranks compute with more OpenMP threads than CPUs: short: those that wait for work sleep "
    "soon (GNU's libgomp); keep: they spin as OMP_WAIT_POLICY says",
    _one_of("short", "keep"),
)
TORCH_BACKEND = Variable(
    "FASTCOLL_TORCH_BACKEND",
    "auto",
    "what torch.distributed gets: auto: the compiled backend where `fastcoll build` made it; "
    "compiled: built at first use, a minute; python: without it",
    _one_of("auto", "compiled", "python"),
)
AS_GLOO = Variable(
    "FASTCOLL_AS_GLOO",
    False,
    'read where torch is imported: 1 lets groups that a program asks for as "gloo" be fastcoll\'s '
    "if their ranks share a machine, else torch's own; the same on all ranks; default: 0",
    _switch,
)
CACHE_DIR = Variable(
    "FASTCOLL_CACHE_DIR",
    "",
    "where what is compiled at first use is kept; default: fastcoll in the user's cache folder",
    str,
)
DEBUG = Variable(
    "FASTCOLL_DEBUG",
    "",
    "trace: note the time and the program's line of every call, for errors and `fastcoll inspect`",
    _one_of("trace"),
)
DUMP_DIR = Variable(
    "FASTCOLL_DUMP_DIR",
    "",
    "where a rank writes what it did last when its group breaks, as a new file "
    "fastcoll-HOST-PID-GROUP-rankR.json; default: nowhere",
    str,
)
TUNING = Variable(
    "FASTCOLL_TUNING",
    "",
    "a table of `fastcoll tune`: what it measured decides before the model does; default: none",
    str,
)
NODE_ID = Variable(
    "FASTCOLL_NODE_ID",
    "",
    "which ranks share memory: those with the same text; default: what the kernel says",
    str,
)
CARRIER = Variable(
    "FASTCOLL_CARRIER",
    "gloo",
    "what moves bytes between nodes, on CPUs, unless init() says more; on GPUs NCCL does",
    str,
)

# Read by scripts/, not by the library.
OF_SCRIPTS = ("FASTCOLL_VENV", "FASTCOLL_TORCH")
_PREFIX = "FASTCOLL_"


def misspelt() -> list[str]:
    """Return a line for each FASTCOLL_ variable of the environment that nothing reads."""
    known = [*(variable.name for variable in VARIABLES), *OF_SCRIPTS]
    # Without the prefix, which all names have in common and which would make all alike.
    ends = [name.removeprefix(_PREFIX) for name in known]
    lines = []
    for name in sorted(os.environ):
        if not name.upper().startswith(_PREFIX) or name in known:
            continue
        near = difflib.get_close_matches(name.upper().removeprefix(_PREFIX), ends, 1)
        advice = f"did you mean {_PREFIX}{near[0]}?" if near else "`fastcoll doctor` lists them all"
        lines.append(f"{name} is set, but no such variable exists: {advice}")
    return lines


def is_first_on_node() -> bool:
    """Return whether the launcher says that this process is the first of its node."""
    told = (os.environ[name] for name in launchers.LOCAL_RANKS if name in os.environ)
    return next(told, "") == "0"


def for_rank(rank: int, world_size: int, store_port: int, num_threads: int) -> dict[str, str]:
    """Return this process's environment with what torchrun would tell a rank of this machine."""
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store_port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": f"fastcoll-{os.getpid()}",
    }
    # Without a buffer a rank's lines come when they are printed, though they go through a pipe.
    usual = {"OMP_NUM_THREADS": str(num_threads), "PYTHONUNBUFFERED": "1"}
    return {**usual, **os.environ, **{name: str(value) for name, value in told.items()}}


def allow_ddp_comm_memory() -> None:
    """Let DDP ask its backend for the memory of its buckets, unless the user has said whether."""
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")


def cache_dir() -> Path | None:
    """Return the folder for modules that are compiled at first use.

    None where nothing names one: no variable, and a user without a home.
    """
    if CACHE_DIR.is_set():
        return Path(CACHE_DIR.get())
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder, "fastcoll")
    home = home_dir()
    return home and home / ".cache" / "fastcoll"


def home_dir() -> Path | None:
    """Return the user's home; None in a container whose user has neither HOME nor an account."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def launch() -> Launch | None:
    """Return this rank's place as its launcher tells it; None when it was not launched as a rank.

    Raises:
        UsageError: Some of the variables are there but do not make sense.
    """
    return find_launch(os.environ)


def explain_no_launch() -> str:
    """Return which of a launcher's variables are there, where they do not suffice; else ""."""
    return launchers.explain_no_launch(os.environ)


def prepare_gpu_threads() -> None:
    """Set CUDA's variables for ranks that are threads sharing a GPU; before CUDA is first used.

    Kernels of different ranks wait for each other. Each rank's stream needs a hardware queue of its
    own, and no kernel may have to be loaded while another one waits.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def prepare_shared_gpus() -> None:
    """Let NCCL and torch's symmetric memory put several ranks on one GPU; before they start."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


def nccl_shares_gpus() -> bool:
    """Return whether NCCL was told that several ranks may be on one GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def mps_folder() -> str:
    """Return where the pipes of NVIDIA's MPS are, if its daemon runs."""
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
