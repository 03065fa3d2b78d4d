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
_LAUNCHED = (
    *("verb", "dtype", "op", "algorithm", "numel", "root", "input", "output", "stream"),
    *("limit_ns", "host", "counted", "to_0", "to_1", "from_0", "from_1"),
    *("input_0", "input_1", "output_0", "output_1"),
)
_SOURCES = (
    "tests/support/fake_cuda.cpp",
    "tests/support/fake_events.cpp",
    "tests/support/fake_tensors.cpp",
    "csrc/cuda/device_group.cpp",
    "csrc/cuda/host_words.cpp",
    "csrc/cuda/launch_order.cpp",
    "csrc/cuda/measuring.cpp",
    *(f"csrc/memory/cuda_{name}.cpp" for name in ("driver", "ipc", "multicast", "vmm")),
    "csrc/python/cuda/bindings.cpp",
    "csrc/python/errors.cpp",
)


def build_fake_cuda(folder: Path, optimise: str = "-O0") -> Path:
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
    flags = ["-std=c++20", optimise, "-fPIC", "-fvisibility=hidden"]
    flags += [f"-I{one}" for one in places]

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
        self.library.fake_launches.restype = ctypes.c_uint64
        self.library.fake_launched.restype = ctypes.POINTER(ctypes.c_uint64)
        self.library.fake_done_in_streams.restype = ctypes.POINTER(ctypes.c_uint64)
        self._show_tensors()

    def _show_tensors(self) -> None:
        """Let the core, which is not loaded yet, read torch's tensors by the fake's table."""
        import torch

        name, api = b"dlpack_exchange_api", ctypes.pythonapi
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_New.restype = ctypes.py_object
        api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self._name = name  # the capsule keeps its address
        place = "__dlpack_c_exchange_api__"
        real = api.PyCapsule_GetPointer(getattr(torch.Tensor, place), name)
        self.library.fake_exchange_api.argtypes = [ctypes.c_void_p]
        self.library.fake_exchange_api.restype = ctypes.c_void_p
        made = self.library.fake_exchange_api(real)
        setattr(torch.Tensor, place, api.PyCapsule_New(made, name, None))

    def contexts(self) -> list[int]:
        """Return the devices on which this process made a context."""
        bits = int(self.library.fake_contexts())
        return [device for device in range(64) if bits >> device & 1]

    def created_bytes(self) -> int:
        """Return the bytes of all device memory that this process made."""
        return int(self.library.fake_created_bytes())

    def put_tensors_on(self, device: int) -> None:
        """Let torch's tensors lie on a GPU, as far as C++ sees; -1: where they are."""
        self.library.fake_put_tensors_on(device)

    def use_stream(self, stream: int) -> None:
        """Let this stream be torch's current one."""
        self.library.fake_use_stream(ctypes.c_size_t(stream))

    def capture(self, begins: bool) -> None:
        """Begin or end a capture of all streams."""
        self.library.fake_capture(begins)

    def refuse(self, refuses_all: bool) -> None:
        """Refuse launches of collectives, from now on or no longer."""
        self.library.fake_refuse(refuses_all)

    def fill_queue(self, fills: bool) -> None:
        """Let whoever launches a collective wait, from now on or no longer."""
        self.library.fake_fill_queue(fills)

    def waits(self) -> bool:
        """Return whether somebody waits there."""
        return bool(self.library.fake_waits() & 1)

    def be_late(self, is_late: bool) -> None:
        """Let no event have come, from now on or no longer."""
        self.library.fake_be_late(is_late)

    def capture_events(self, captures: bool) -> None:
        """Let each event be one of a capture, from now on or no longer."""
        self.library.fake_capture_events(captures)

    def done_in_streams(self) -> list[tuple[str, int, int]]:
        """Return (launch, record or wait; stream; event) of all since the last question."""
        number = ctypes.c_uint64()
        words = self.library.fake_done_in_streams(ctypes.byref(number))
        rows = [tuple(words[at : at + 3]) for at in range(0, number.value, 3)]
        return [(("launch", "record", "wait")[what - 1], stream, at) for what, stream, at in rows]

    def launches(self) -> int:
        """Return how many collectives were launched."""
        return int(self.library.fake_launches())

    def launched(self) -> dict[str, int]:
        """Return the last one."""
        words = self.library.fake_launched()
        return {name: int(words[place]) for place, name in enumerate(_LAUNCHED)}
