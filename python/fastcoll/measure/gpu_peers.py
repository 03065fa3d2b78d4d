# SPDX-License-Identifier: Apache-2.0
"""The libraries beside fastcoll on GPUs: NCCL, torch's symmetric memory and CuPy, in each way.

Decides how each is brought up and which of its functions is called, and gives the reason where it
can't be had here. The environment of their processes is set in pool.py.
"""

import importlib
import importlib.util
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastcoll.machine.gpu import SHARING_NCCL, nccl_version
from fastcoll.measure.gpu_libraries import FastcollInGraph, FastcollOnGpu, InGraph, OnGpu
from fastcoll.measure.libraries import Gloo
from fastcoll.measure.library import IN_GRAPH, Bound, Library, WorkerConfig
from fastcoll.measure.pattern import Cell

_HOST = "127.0.0.1"
_PORT_LIMIT_S = 20.0
_CUPY_OPS = {"sum": "sum", "product": "prod", "min": "min", "max": "max"}
_NO_WINDOWS = f"torch {torch.__version__} registers no windows with NCCL"
Version = tuple[int, ...]


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def nccl_refusal(version: Version, shares: bool, needs: tuple[str, Version] = ("", ())) -> str:
    """Return why an NCCL can't be measured, with ranks that share a GPU or not; or nothing.

    Args:
        needs: A feature that it must have, and the first version that surely has it.
    """
    what, since = needs
    if not version:
        return "there is no NCCL here"
    if shares and version < SHARING_NCCL:
        return f"NCCL {_text(version)} refuses several ranks on one GPU"
    if version < since:
        return f"{what} is measured from NCCL {_text(since)} on; here is {_text(version)}"
    return ""


class Nccl(OnGpu, Gloo):
    """torch.distributed over NCCL."""

    backend = "nccl"
    needs: tuple[str, Version] = ("", ())

    def __init__(self, config: WorkerConfig) -> None:
        num_gpus = torch.cuda.device_count()
        text = nccl_refusal(nccl_version(), config.world_size > num_gpus, self.needs)
        if num_gpus and text:
            raise NotImplementedError(text)
        super().__init__(config)

    def version(self) -> str:
        return f"NCCL {_text(nccl_version())}, torch {torch.__version__}"


class NcclNowin(Nccl):
    """NCCL with its kernels for symmetric memory on any memory: NCCL_SYM_NOWIN_ENABLE."""

    needs = ("NCCL_SYM_NOWIN_ENABLE", (2, 29))  # 2.28.3 does not have it


class NcclWindow(Nccl):
    """NCCL on memory of its own, which the ranks have registered as a window."""

    needs = ("memory registered as a window", (2, 27))

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        dist.all_reduce(torch.zeros(1, device=self.device))  # without it there is no communicator
        self._backend = _world()._get_backend(self.device)
        self._pools: list[Any] = []
        self.allocate(1, torch.float32)  # to say now if it can't be had
        self.release()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Each in a pool of its own. That has one segment, so all ranks register the same one. All
        # tensors lie at the same place of it.
        pool = self._pool()
        with torch.cuda.use_mem_pool(pool):
            tensor = super().allocate(numel, dtype)
        try:
            self._backend.register_mem_pool(pool, symm=True)
        except (AttributeError, TypeError):
            raise NotImplementedError(_NO_WINDOWS) from None
        self._pools.append(pool)
        return tensor

    def _pool(self) -> Any:
        try:
            return torch.cuda.MemPool(self._backend.mem_allocator)
        except AttributeError:
            raise NotImplementedError(_NO_WINDOWS) from None

    def prepare(self, cell: Cell) -> int | None:
        NcclWindow.release(self)  # of this class: InGraph's would drop the graphs to be captured
        return super().prepare(cell)

    def release(self) -> None:
        super().release()
        torch.cuda.synchronize()
        for pool in self._pools:  # all ranks at once, like the registering
            self._backend.deregister_mem_pool(pool)
        self._pools.clear()


def _world() -> Any:
    return dist.group.WORLD


class SymmMem(OnGpu, Gloo):
    """torch's symmetric memory, by one of its algorithms; Gloo only introduces the ranks."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        from torch.distributed import _symmetric_memory

        tensor = _symmetric_memory.empty(numel, dtype=dtype, device=self.device)
        self._handle = _symmetric_memory.rendezvous(tensor, _world())
        return tensor

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        if cell.verb == "barrier":
            return self.barrier, ()
        if (cell.verb, cell.op) != ("all_reduce", "sum"):
            raise NotImplementedError("torch's symmetric memory has all_reduce of sums here")
        return self.call(output)

    def call(self, tensor: torch.Tensor) -> Bound:
        """Return the call that reduces a symmetric tensor; the result goes to `_output`."""
        raise NotImplementedError


class SymmOneShot(SymmMem):
    """Its one_shot: out of place, as it has no other."""

    def call(self, tensor: torch.Tensor) -> Bound:
        self._output = torch.empty_like(tensor)
        one_shot = torch.ops.symm_mem.one_shot_all_reduce_out
        return one_shot, (tensor, "sum", _world().group_name, self._output)


class SymmTwoShot(SymmMem):
    """Its two_shot, in place."""

    def call(self, tensor: torch.Tensor) -> Bound:
        return torch.ops.symm_mem.two_shot_all_reduce_, (tensor, "sum", _world().group_name)


class SymmMultimem(SymmMem):
    """Its multimem, in place: the switch adds."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.allocate(4, torch.float32)
        if not self._handle.multicast_ptr:
            raise NotImplementedError("torch's symmetric memory has no multicast on these GPUs")

    def call(self, tensor: torch.Tensor) -> Bound:
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise NotImplementedError(f"torch's multimem adds float32 and bfloat16, not {kind}")
        return torch.ops.symm_mem.multimem_all_reduce_, (tensor, "sum", _world().group_name)


class Cupy(OnGpu):
    """cupyx.distributed over NCCL, on CuPy's arrays in the memory of torch's tensors."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        if importlib.util.find_spec("cupy") is None:
            raise NotImplementedError("CuPy is not installed")
        self._cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
        code = nccl.get_version() if nccl.available else 0
        self._nccl_version = (code // 10_000, code // 100 % 100, code % 100) if code else ()
        shares = self.world_size > torch.cuda.device_count()
        if text := nccl_refusal(self._nccl_version, shares):
            raise NotImplementedError(f"CuPy {self._cupy.__version__}: {text}")
        self._cupy.cuda.Device(self.device.index).use()
        self._group = importlib.import_module("cupyx.distributed").init_process_group(
            self.world_size, self.rank, host=_HOST, port=_agree_on_port(config)
        )
        self._one = self._cupy.zeros(1, dtype="float32")

    def version(self) -> str:
        return f"NCCL {_text(self._nccl_version)}, CuPy {self._cupy.__version__}"

    def barrier(self) -> None:
        # As torch's over NCCL does; CuPy's own lets the ranks go one by one, through a server.
        self._group.all_reduce(self._one, self._one)
        torch.cuda.synchronize()

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        if cell.verb == "barrier":
            return self.barrier, ()
        if cell.verb != "all_reduce" or cell.op not in _CUPY_OPS:
            raise NotImplementedError(f"CuPy has all_reduce here, of {', '.join(_CUPY_OPS)}")
        array = self._cupy.from_dlpack(output)
        return self._group.all_reduce, (array, array, _CUPY_OPS[cell.op])

    def close(self) -> None:
        self.release()
        del self._group  # with it ends the server on rank 0 that introduced the ranks


def _agree_on_port(config: WorkerConfig) -> int:
    """Return a port that is free on rank 0's side, the same on all ranks."""
    store = dist.FileStore(config.store_path, config.world_size)
    store.set_timeout(timedelta(seconds=_PORT_LIMIT_S))
    if config.rank == 0:
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            store.set("port", str(probe.getsockname()[1]))
    return int(store.get("port"))


class CupyInGraph(InGraph, Cupy):
    """CuPy's NCCL in a captured graph."""

    def capture(
        self, run: Callable[[], None], stream: torch.cuda.Stream | None = None
    ) -> torch.cuda.CUDAGraph:
        def run_there() -> None:
            with self._cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
                run()

        return super().capture(run_there, stream)


def _in_graph(kind: type[OnGpu]) -> type[Library]:
    """Return a library's calls in a captured graph."""
    return type(f"{kind.__name__}InGraph", (InGraph, kind), {"__doc__": "In a captured graph."})


_WAYS: dict[str, type[OnGpu]] = {
    "nccl_default": Nccl,
    "nccl_nowin": NcclNowin,
    "nccl_window": NcclWindow,
    "symm_one_shot": SymmOneShot,
    "symm_two_shot": SymmTwoShot,
    "symm_multimem": SymmMultimem,
}
GPU_LIBRARIES: dict[str, type[Library]] = {
    "fastcoll_gpu": FastcollOnGpu,
    "fastcoll_graph": FastcollInGraph,
    **_WAYS,
    **{name + IN_GRAPH: _in_graph(kind) for name, kind in _WAYS.items()},
    "cupy": Cupy,
    "cupy" + IN_GRAPH: CupyInGraph,
}
