# SPDX-License-Identifier: Apache-2.0
"""The libraries beside fastcoll on GPUs, without one: their calls, and why some can't be had."""

import contextlib
import importlib.machinery
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fastcoll.measure import gpu_libraries, gpu_peers
from fastcoll.measure.library import IN_GRAPH, Library, WorkerConfig
from fastcoll.measure.pattern import make_cell
from tests.gpu_host.fake_event import Graph, use_fake_events

CELL = make_cell("all_reduce", "float32", "sum", 64, 1)


def config(library: str = "", world_size: int = 1, rank: int = 0, store: str = "") -> WorkerConfig:
    return WorkerConfig(library, world_size, "", store, None, rank=rank)


# ---- NCCL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "shares", "library", "words"),
    [
        ((), False, gpu_peers.Nccl, "no NCCL"),
        ((2, 29, 7), True, gpu_peers.Nccl, "NCCL 2.29.7 refuses several ranks on one GPU"),
        ((2, 30, 4), True, gpu_peers.Nccl, ""),
        ((2, 26, 2), False, gpu_peers.Nccl, ""),
        ((2, 28, 9), False, gpu_peers.NcclNowin, "NOWIN_ENABLE is measured from NCCL 2.29"),
        ((2, 29, 2), False, gpu_peers.NcclNowin, ""),
        ((2, 26, 5), False, gpu_peers.NcclWindow, "window is measured from NCCL 2.27 on"),
        ((2, 27, 3), False, gpu_peers.NcclWindow, ""),
    ],
)
def test_what_nccl_does_not_know_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, ...],
    shares: bool,
    library: type[gpu_peers.Nccl],
    words: str,
) -> None:
    """The reason comes before anything of the group is made."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_peers, "nccl_version", lambda: version)

    def make_group(*args: object) -> None:
        raise ConnectionError("it went on")

    monkeypatch.setattr(gpu_peers.OnGpu, "__init__", make_group)
    error = NotImplementedError if words else ConnectionError
    with pytest.raises(error, match=words or "it went on"):
        library(config(world_size=2 if shares else 1))


class Backend:
    """NCCL's side of a group: which pools are registered, and what was done in which order."""

    mem_allocator = object()

    def __init__(self) -> None:
        self.log: list[str] = []
        self.registered: list[object] = []
        self.library: Any = None

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        assert symm, "as a window"
        assert pool.allocator is self.mem_allocator
        assert pool.num_tensors == 1, "what is in the pool now is registered"
        self.log.append("register")
        self.registered.append(pool)

    def deregister_mem_pool(self, pool: Any) -> None:
        assert self.library._output.numel() == 0, "nobody has the memory any more"
        self.log.append("deregister")
        self.registered.remove(pool)


class WithoutWindows(Backend):
    """That of an older torch."""

    def register_mem_pool(self, pool: Any) -> None:  # type: ignore[override]
        raise AssertionError("not reached")


class Pools:
    """Memory pools of CUDA."""

    current: "Pools | None" = None

    def __init__(self, allocator: object) -> None:
        self.allocator, self.num_tensors = allocator, 0


@contextlib.contextmanager
def use_mem_pool(pool: Pools) -> Iterator[None]:
    Pools.current = pool
    yield
    Pools.current = None


@pytest.fixture
def on_nccl(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`on_nccl(library, backend)`: a group of one rank on the CPU, whose calls are recorded."""
    for name, value in {
        "MemPool": Pools,
        "use_mem_pool": use_mem_pool,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    use_fake_events(monkeypatch)

    def make_group(self: Any, config: WorkerConfig) -> None:
        self.device = torch.device("cpu")
        Library.__init__(self, config)

    def allocate(self: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
        assert Pools.current is not None, "in the pool"
        Pools.current.num_tensors += 1
        return torch.empty(numel, dtype=dtype)

    monkeypatch.setattr(gpu_peers.Nccl, "__init__", make_group)
    monkeypatch.setattr(gpu_libraries.OnGpu, "allocate", allocate)
    monkeypatch.setattr(gpu_peers.Gloo, "barrier", lambda self: None)

    def make(library: type[gpu_peers.NcclWindow], backend: Any) -> Any:
        def all_reduce(tensor: torch.Tensor, op: object = None) -> None:
            call = "call" if backend.registered else "connect"
            if Graph.capturing:
                Graph.capturing.calls.append(lambda: backend.log.append(f"replayed {call}"))
            else:
                backend.log.append(call)

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        world = SimpleNamespace(_get_backend=lambda device: backend)
        monkeypatch.setattr(gpu_peers, "_world", lambda: world)
        made = library.__new__(library)
        backend.library = made
        made.__init__(config())  # type: ignore[misc]
        return made

    return make


TRIED = ["connect", "register", "deregister"]


@pytest.mark.parametrize("name", ["nccl_window", "nccl_window_graph"])
def test_memory_is_a_window_while_calls_are_made_in_it(
    on_nccl: Callable[..., Any], name: str
) -> None:
    backend = Backend()
    nccl = on_nccl(gpu_peers.GPU_LIBRARIES[name], backend)
    assert backend.log == TRIED, "it can be had"
    once = ["register", "call"]
    if name.endswith(IN_GRAPH):
        once += ["deregister", "register", "replayed call"]
    for _ in range(2):  # sizes
        backend.log.clear()
        assert nccl.prepare(CELL) == 0
        assert backend.log[: len(once)] == once
        assert len(backend.registered) == 1
        nccl.loop(3)
        assert set(backend.log[len(once) :]) == {once[-1]}
        nccl.release()
        assert not backend.registered
    nccl.prepare(CELL)
    nccl.prepare(CELL)  # without a release between them, as after an error
    assert len(backend.registered) == 1


def test_a_torch_without_windows_says_so(on_nccl: Callable[..., Any]) -> None:
    for backend in (WithoutWindows(), SimpleNamespace(registered=[], log=[])):
        with pytest.raises(NotImplementedError, match=r"torch .* registers no windows with NCCL"):
            on_nccl(gpu_peers.NcclWindow, backend)


# ---- torch's symmetric memory --------------------------------------------------------------------


@pytest.fixture
def symmetric(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """`symmetric(multicast_ptr)` is the library "symm_multimem" of a group of one on the CPU."""
    from torch.distributed import _symmetric_memory

    def make_group(self: Any, config: WorkerConfig) -> None:
        self.device = torch.device("cpu")
        Library.__init__(self, config)

    monkeypatch.setattr(gpu_libraries.OnGpu, "__init__", make_group)
    monkeypatch.setattr(_symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(gpu_peers, "_world", lambda: SimpleNamespace(group_name="all"))

    def make(multicast_ptr: int) -> Any:
        handle = SimpleNamespace(multicast_ptr=multicast_ptr)
        monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda *args: handle)
        return gpu_peers.SymmMultimem(config())

    return make


def test_multimem_needs_multicast(symmetric: Callable[[int], Any]) -> None:
    with pytest.raises(NotImplementedError, match="no multicast on these GPUs"):
        symmetric(0)


def test_multimem_adds_two_types(symmetric: Callable[[int], Any]) -> None:
    library = symmetric(4096)
    for dtype in ("float32", "bfloat16"):
        cell = make_cell("all_reduce", dtype, "sum", 64, 2)
        tensor = torch.zeros(4, dtype=cell.torch_dtype)
        call, arguments = library.bind(cell, tensor, tensor)
        assert "multimem_all_reduce_" in str(call)
        assert arguments[0] is tensor
        assert arguments[1:] == ("sum", "all")
    for dtype, op, words in (
        ("float16", "sum", "adds float32 and bfloat16, not float16"),
        ("float32", "max", "all_reduce of sums"),
    ):
        cell = make_cell("all_reduce", dtype, op, 64, 2)
        tensor = torch.zeros(4, dtype=cell.torch_dtype)
        with pytest.raises(NotImplementedError, match=words):
            library.bind(cell, tensor, tensor)


# ---- CuPy ----------------------------------------------------------------------------------------


class CupyGroup:
    """A communicator of cupyx.distributed, of one rank."""

    def __init__(self, num: int, rank: int, *, host: str, port: int) -> None:
        assert (num, rank, host) == (1, 0, "127.0.0.1")
        assert 1024 <= port < 65536
        self.calls: list[tuple[Any, Any, str]] = []

    def all_reduce(self, given: Any, out: Any, op: str = "sum") -> None:
        self.calls.append((given, out, op))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`cupy(library, nccl's version)`: CuPy's end of a group, with NumPy in CuPy's place."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_libraries, "mps_runs", lambda: True)
    monkeypatch.setattr(gpu_libraries.env, "prepare_shared_gpus", lambda: None)

    def make(library: type[gpu_peers.Cupy], version: int, world_size: int = 1) -> Any:
        modules = {name: ModuleType(name) for name in ("cupy", "cupy.cuda.nccl", "cupyx")}
        modules["cupyx.distributed"] = ModuleType("cupyx.distributed")
        main: Any = modules["cupy"]
        main.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        main.__version__, main.zeros, main.from_dlpack = "14.2", np.zeros, np.from_dlpack
        main.cuda = SimpleNamespace(
            Device=lambda index: SimpleNamespace(use=lambda: None), Stream=None
        )
        modules["cupy.cuda.nccl"].__dict__.update(
            available=version > 0, get_version=lambda: version
        )
        modules["cupyx.distributed"].__dict__.update(init_process_group=CupyGroup)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return library(config("cupy", world_size, store=str(tmp_path / "store")))

    return make


def test_cupys_call_is_made_on_the_tensors_memory(cupy: Callable[..., Any]) -> None:
    library = cupy(gpu_peers.Cupy, 23004)
    assert library.version() == "NCCL 2.30.4, CuPy 14.2"
    tensor = torch.zeros(8)
    for op, name in (("sum", "sum"), ("product", "prod")):
        cell = make_cell("all_reduce", "float32", op, 32, 1)
        call, arguments = library.bind(cell, tensor, tensor)
        call(*arguments)
        given, out, told = library._group.calls[-1]
        tensor.fill_(5)
        assert given is out
        assert given.tolist() == [5.0] * 8
        assert told == name
    for verb, op in (("all_reduce", "avg"), ("broadcast", "sum")):
        with pytest.raises(NotImplementedError, match="CuPy has all_reduce here"):
            library.bind(make_cell(verb, "float32", op, 32, 1), tensor, tensor)
    group = weakref.ref(library._group)
    del call
    library.close()
    assert group() is None, "its server ends with it"


def test_cupys_calls_are_captured_in_torchs_stream(
    cupy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = cupy(gpu_peers.CupyInGraph, 23004)
    use_fake_events(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "torch's")
    log: list[str] = []

    @contextlib.contextmanager
    def from_external(stream: str) -> Iterator[None]:
        log.append(f"{stream}, captured: {Graph.capturing is not None}")
        yield
        log.append("left")

    library._cupy.cuda.Stream = SimpleNamespace(from_external=from_external)
    library.capture(lambda: log.append("call"))
    assert log == ["torch's, captured: True", "call", "left"]


@pytest.mark.parametrize(
    ("version", "world_size", "words"),
    [(0, 1, "there is no NCCL"), (22907, 2, "NCCL 2.29.7 refuses several ranks on one GPU")],
)
def test_cupys_nccl_may_not_do(
    cupy: Callable[..., Any], version: int, world_size: int, words: str
) -> None:
    with pytest.raises(NotImplementedError, match=f"CuPy 14.2: .*{words}"):
        cupy(gpu_peers.Cupy, version, world_size)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="not run: CuPy is here")
def test_a_machine_without_cupy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(NotImplementedError, match="CuPy is not installed"):
        gpu_peers.Cupy(config())


def test_the_ranks_of_cupy_agree_on_a_port(tmp_path: Path) -> None:
    ports: dict[int, int] = {}

    def ask(rank: int) -> None:
        ports[rank] = gpu_peers._agree_on_port(config("cupy", 3, rank, str(tmp_path / "store")))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(ports) == {0, 1, 2}
    assert len(set(ports.values())) == 1
