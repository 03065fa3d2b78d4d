# SPDX-License-Identifier: Apache-2.0
"""Ranks that are late, stop or die at a named point of the protocol.

A point is "before" or "after" the publication of one of the words of
tests/protocol/native/words.h ("before arrive", "after done"). Other points are the middle of a
"copy" to or from shared memory, of a "reduction", or of a "foreign copy" out of another process.

Points exist in an extension that is compiled for tests (tests/protocol/native/fault_points.h).
Decides how it is built, and how ranks come to use it instead of the one that ships.
"""

import ctypes
import os
import re
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pybind11

from tests.support.environment import ranks_with

ROOT = Path(__file__).parents[2]
COMPILER = "g++"
COMPILE_LIMIT_S = 300
# As setup.py has them.
FOLDERS = ("csrc/python", "csrc/group", "csrc/cpu")
SOURCES = (
    *(f"{folder}/*.cpp" for folder in FOLDERS),
    "csrc/memory/memfd.cpp",
    "tests/protocol/native/fault_points.cpp",
)
FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-builtin-memcpy")
LINK_FLAGS = ("-shared", "-Wl,--wrap=memcpy,--wrap=process_vm_readv")
ACTIONS = ("count", "delay", "stop", "kill")
DELAY_S = 0.004  # longer than a wait spins, and than it sleeps before it looks for a reason


def build(folder: Path) -> Path:
    """Compile the extension and put it into a copy of the package; return where to import it."""
    package = folder / "fastcoll"
    package.mkdir()
    for entry in (ROOT / "python" / "fastcoll").iterdir():
        if not entry.name.startswith(("_C.", "__pycache__")):
            (package / entry.name).symlink_to(entry)
    includes = [ROOT / "csrc", ROOT / "kernels", ROOT / "python", ROOT / "tests/protocol/native"]
    includes += [Path(pybind11.get_include()), Path(sysconfig.get_path("include"))]
    command = [COMPILER, *FLAGS, *(f"-I{path}" for path in includes)]

    def compile_one(source: Path) -> str:
        extra = ["-include", "fault_points.h"]
        if source.name == "reduce.cpp":
            extra.append("-Dreduce_fn=plain_reduce_fn")
        target = str(folder / f"{source.parent.name}-{source.stem}.o")
        _run([*command, *extra, "-c", str(source), "-o", target])
        return target

    sources = [source for pattern in SOURCES for source in sorted(ROOT.glob(pattern))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    target = package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    _run([COMPILER, *LINK_FLAGS, *objects, "-o", str(target)])
    return folder


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr


def ranks_from(folder: Path) -> AbstractContextManager[None]:
    """Let pools that are made meanwhile start ranks which import the library from a folder."""
    return ranks_with(PYTHONPATH=os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


class Points:
    """The points of the process that this is called in."""

    def __init__(self) -> None:
        from fastcoll import _C

        self._lib = ctypes.CDLL(_C.__file__)
        self._lib.fault_points_name.restype = ctypes.c_char_p
        self._lib.fault_points_watch.argtypes = [ctypes.c_size_t, ctypes.c_size_t] + [
            ctypes.c_bool
        ] * 2
        self._names: list[str] = []
        while name := self._lib.fault_points_name(len(self._names)):
            self._names.append(name.decode())

    def arm(self, point: str = "", number: int = 1, action: str = "count") -> None:
        """Let something happen the `number`th time that this rank reaches a point from now on.

        Only in groups and symmetric memory that exist already.
        """
        maps = Path("/proc/self/maps").read_text()
        pattern = r"^(\w+)-(\w+) .* /memfd:fastcoll-(region|arena)"
        for at, (begin, end, kind) in enumerate(re.findall(pattern, maps, re.MULTILINE)):
            self._lib.fault_points_watch(int(begin, 16), int(end, 16), kind == "region", at == 0)
        index = self._names.index(point) if point else -1
        self._lib.fault_points_arm(index, number, ACTIONS.index(action), int(DELAY_S * 1e6))

    def disarm(self) -> dict[str, int]:
        """End it; return how often each point was reached meanwhile."""
        self._lib.fault_points_disarm()
        found = {name: self._lib.fault_points_reached(at) for at, name in enumerate(self._names)}
        return {name: count for name, count in found.items() if count}

    def plant(self, bug: str) -> None:
        """Plant a bug of planted.h in this process, for good."""
        assert self._lib.fault_points_plant(bug.encode()), bug
