# SPDX-License-Identifier: Apache-2.0
"""oneCCL beside fastcoll: where its wheel is, how its ranks are started, and its calls.

Its wheel has no Python interface, so oneccl_shim.cpp is compiled against the wheel's header. Its
ranks meet through Intel MPI, which starts them. Decides which of its functions stands for a verb.
Knows nothing of windows or of other libraries.
"""

import ctypes
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fastcoll.measure import mpi
from fastcoll.measure.library import Bound, Library, WorkerConfig
from fastcoll.measure.mpi import FLAVOURS, MpiInstall
from fastcoll.measure.pattern import Cell

NAME = "oneccl"
PACKAGES = "oneccl-cpu oneccl-cpu-devel impi-rt"
_SOURCE = Path(__file__).with_name("oneccl_shim.cpp")
_LIBRARY, _HEADER = "lib/libccl.so", "include/oneapi/ccl.hpp"
# The codes of oneccl_shim.cpp, in its order.
_VERBS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "barrier",
)


def find(mpi_dir: Path) -> MpiInstall | None:
    """Return the Intel MPI that has oneCCL beside it, under `mpi_dir` or in this environment."""
    flavour = FLAVOURS["intelmpi"]
    for prefix in (mpi_dir / NAME, Path(sys.prefix)):
        needed = (_LIBRARY, _HEADER, flavour.libmpi, "bin/mpiexec")
        if all((prefix / name).exists() for name in needed):
            return MpiInstall(flavour, prefix.resolve())
    return None


def build(install: MpiInstall, build_dir: Path) -> Path:
    """Compile oneccl_shim.cpp and return the library.

    Raises:
        RuntimeError: No compiler, or its first complaint.
    """
    shim = build_dir / "oneccl_shim.so"
    options = ["-std=c++17", "-O2", "-shared", "-fPIC"]
    mpi.build(_SOURCE, shim, install.prefix / _LIBRARY, options)
    return shim


def commands(install: MpiInstall, rank_commands: list[list[str]], num_cpus: int) -> list[list[str]]:
    """Return the one command that starts all ranks: oneCCL loads MPI by its name alone.

    Each rank has a second thread that carries its calls. Where there are too few CPUs for both it
    is told to yield, or a call would take a slice of the scheduler.
    """
    launch = install.launch_command(rank_commands, num_cpus)
    lib = install.prefix / "lib"
    its = [f"CCL_ROOT={install.prefix}", f"LD_LIBRARY_PATH={lib}", "CCL_ATL_TRANSPORT=mpi"]
    if 2 * len(rank_commands) > num_cpus:
        its.append("CCL_YIELD=sched_yield")
    return [["env", *its, *launch]]


class _Call(ctypes.Structure):
    _fields_ = (
        ("verb", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("op", ctypes.c_int),
        ("root", ctypes.c_int),
        ("numel", ctypes.c_size_t),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
    )


def load(shim: str) -> ctypes.CDLL:
    """Load a library that `build` made, with the types of its functions."""
    loaded = ctypes.CDLL(shim)
    for name in ("error", "version"):
        getattr(loaded, f"fc_ccl_{name}").restype = ctypes.c_char_p
    loaded.fc_ccl_address_bytes.restype = ctypes.c_size_t
    loaded.fc_ccl_loop.restype = ctypes.c_double
    loaded.fc_ccl_loop.argtypes = (ctypes.POINTER(_Call), ctypes.c_int)
    return loaded


class OneCcl(Library):
    """oneCCL on CPUs. Its calls from Python are those of a C function by ctypes."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        assert config.oneccl_shim is not None
        self._ccl = load(config.oneccl_shim)
        store = dist.FileStore(config.store_path, config.world_size)
        address = ctypes.create_string_buffer(self._ccl.fc_ccl_address_bytes())
        if self.rank == 0:
            self._require(self._ccl.fc_ccl_make_address(address))
            store.set(NAME, address.raw.hex())
        else:
            address.raw = bytes.fromhex(store.get(NAME).decode())
        self._require(self._ccl.fc_ccl_join(address, self.rank, self.world_size))

    def _require(self, outcome: float) -> None:
        if outcome < 0:
            raise RuntimeError(self._ccl.fc_ccl_error().decode(errors="replace"))

    def version(self) -> str:
        return f"oneCCL {self._ccl.fc_ccl_version().decode()}"

    def barrier(self) -> None:
        self._require(self._ccl.fc_ccl_run(ctypes.byref(_Call(_VERBS.index("barrier")))))

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        if cell.verb not in _VERBS:
            raise NotImplementedError(f"oneCCL has no {cell.verb}")
        codes = {"dtype": 0, "op": 0}
        if cell.verb != "barrier":
            codes["dtype"] = self._ccl.fc_ccl_dtype(cell.dtype.encode())
            codes["op"] = self._ccl.fc_ccl_op(cell.op.encode())
            if min(codes.values()) < 0:
                raise NotImplementedError(f"oneCCL has no {cell.op} of {cell.dtype} here")
        part = min(output, source, key=torch.Tensor.numel)  # the whole, or a rank's part of it
        numel = part.numel() // (self.world_size if cell.verb == "all_to_all" else 1)
        places = (numel, source.data_ptr(), output.data_ptr())
        call = _Call(_VERBS.index(cell.verb), codes["dtype"], codes["op"], cell.root, *places)
        return self._ccl.fc_ccl_run, (ctypes.byref(call),)

    def close(self) -> None:
        os._exit(0)  # oneCCL 2022.2 faults in its own end, whether or not its group ends before


class OneCclLoop(OneCcl):
    """The same in a compiled loop."""

    def asynchronous(self, call: Bound) -> Bound:
        raise NotImplementedError("there is no compiled loop of asynchronous calls")

    def loop(self, iterations: int) -> float:
        if not self._call[1]:
            return super().loop(iterations)
        seconds = float(self._ccl.fc_ccl_loop(*self._call[1], iterations))
        self._require(seconds)
        return seconds
