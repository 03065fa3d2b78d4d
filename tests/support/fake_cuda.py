# SPDX-License-Identifier: Apache-2.0
"""fastcoll._cuda on a CUDA made of the CPU: the real bindings, groups and memory, without a GPU.

Decides how it is built and put in the place of the real one. A process has one of both: they would
register the same types. So programs that use it are processes of their own.
"""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pybind11
import pytest

from tests.support.programs import need, run

ROOT = Path(__file__).parents[2]
_NAME = "fastcoll._cuda"
_LIMIT_S = 300
_SOURCES = (
    "tests/support/fake_cuda.cpp",
    "csrc/cuda/device_group.cpp",
    "csrc/cuda/host_words.cpp",
    "csrc/cuda/launch_order.cpp",
    "csrc/cuda/measuring.cpp",
    *(f"csrc/memory/cuda_{name}.cpp" for name in ("driver", "ipc", "multicast", "vmm")),
    "csrc/python/cuda/bindings.cpp",
    "csrc/python/errors.cpp",
)


def build_fake_cuda(folder: Path) -> Path:
    """Compile it, or skip where CUDA's headers are missing; return the extension."""
    need("g++")
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    homes += [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    headers = [Path(home, "include") for home in homes if Path(home, "include/cuda.h").is_file()]
    if not headers:
        pytest.skip("not run: CUDA's headers are not installed")
    places = [ROOT / "csrc", ROOT / "kernels", ROOT / "python", headers[0]]
    places += [pybind11.get_include(), sysconfig.get_path("include")]
    flags = ["-std=c++20", "-O0", "-fPIC", "-fvisibility=hidden", *(f"-I{one}" for one in places)]

    def compile_one(source: str) -> str:
        target = folder / f"{Path(source).stem}.o"
        done = run(["g++", *flags, "-c", source, "-o", target], _LIMIT_S, cwd=ROOT)
        assert done.returncode == 0, done.stdout[-4000:]
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, _SOURCES))
    program = folder / "_cuda.so"
    done = run(["g++", "-shared", *objects, "-o", program], _LIMIT_S)
    assert done.returncode == 0, done.stdout[-4000:]
    return program


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one extension."""

    def __init__(self, path: str) -> None:
        self._loader = importlib.machinery.ExtensionFileLoader(_NAME, path)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self._loader) if name == _NAME else None


class FakeCuda:
    """The controls of the fake.

    Attributes:
        library: Its functions for tests: see fake_cuda.cpp.
    """

    def __init__(self, path: str) -> None:
        """Let this process, which has not imported fastcoll yet, find the extension at `path`."""
        assert "fastcoll" not in sys.modules, "it has the real one already"
        sys.meta_path.insert(0, _Finder(path))
        self.library = ctypes.CDLL(path)
        self.library.fake_contexts.restype = ctypes.c_uint64
        self.library.fake_created_bytes.restype = ctypes.c_uint64

    def contexts(self) -> list[int]:
        """Return the devices on which this process made a context."""
        bits = int(self.library.fake_contexts())
        return [device for device in range(64) if bits >> device & 1]

    def created_bytes(self) -> int:
        """Return the bytes of all device memory that this process made."""
        return int(self.library.fake_created_bytes())
