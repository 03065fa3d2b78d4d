# SPDX-License-Identifier: Apache-2.0
"""What is measured on GPUs: each library's own call, timed by the device's own clock.

Decides which function of a library stands for a verb, and when a comparison would not be fair: it
then says why, and nothing is timed.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastcoll
from fastcoll import env
from fastcoll.measure.libraries import Fastcoll, Gloo
from fastcoll.measure.library import Bound, Library, WorkerConfig
from fastcoll.measure.pattern import Cell

# Since this version, where NCCL_MULTI_RANK_GPU_ENABLE=1; before, it refuses.
SHARING_NCCL = (2, 30)


def problem_of(world_size: int, num_gpus: int, mps: bool) -> str:
    """Return why ranks that are processes can't be measured on these GPUs, or nothing."""
    if num_gpus == 0:
        return "torch sees no CUDA device"
    if world_size > num_gpus and not mps:
        return (
            f"{world_size} processes on {num_gpus} GPUs take turns, which is what would be "
            "measured; start NVIDIA's MPS, or see bench/gpu/check.sh for ranks as threads"
        )
    return ""


def mps_runs() -> bool:
    """Return whether this process's CUDA calls go through NVIDIA's MPS."""
    return Path(env.mps_folder(), "control").exists()


class OnGpu(Library):
    """A library whose tensors lie on this rank's GPU."""

    def __init__(self, config: WorkerConfig) -> None:
        num_gpus = torch.cuda.device_count()
        if text := problem_of(config.world_size, num_gpus, mps_runs()):
            raise NotImplementedError(text)
        self.device = torch.device("cuda", config.rank % num_gpus)
        if config.world_size > num_gpus:
            env.prepare_shared_gpus()
        torch.cuda.set_device(self.device)
        super().__init__(config)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def loop(self, iterations: int) -> float:
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        fn, args = self._call
        start.record()
        for _ in range(iterations):
            fn(*args)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


class FastcollOnGpu(OnGpu, Fastcoll):
    """fastcoll, called directly from Python."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self.config.symmetric:
            return fastcoll.empty(numel, dtype=dtype, device=self.device)
        return super().allocate(numel, dtype)

    def loop(self, iterations: int) -> float:
        seconds = super().loop(iterations)
        self.comm.check()
        return seconds

    def one_way_flag(self, iterations: int) -> float:
        raise NotImplementedError("the flag between CPUs says nothing of GPUs")


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that torch has; (0,) if it has none."""
    if not dist.is_nccl_available():
        return (0,)
    found: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return found


class Nccl(OnGpu, Gloo):
    """torch.distributed over NCCL."""

    backend = "nccl"

    def __init__(self, config: WorkerConfig) -> None:
        if 0 < torch.cuda.device_count() < config.world_size and nccl_version() < SHARING_NCCL:
            raise NotImplementedError(f"{self.version()} refuses several ranks on one GPU")
        super().__init__(config)

    def version(self) -> str:
        return f"NCCL {'.'.join(map(str, nccl_version()))}, torch {torch.__version__}"


class SymmMem(OnGpu, Gloo):
    """torch's symmetric memory, by one of its algorithms; Gloo only introduces the ranks."""

    function = ""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        from torch.distributed import _symmetric_memory

        tensor = _symmetric_memory.empty(numel, dtype=dtype, device=self.device)
        _symmetric_memory.rendezvous(tensor, _world())
        return tensor

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        if cell.verb == "barrier":
            return self.barrier, ()
        if (cell.verb, cell.op) != ("all_reduce", "sum"):
            raise NotImplementedError("torch's symmetric memory has all_reduce of sums here")
        return self.call(output)

    def call(self, tensor: torch.Tensor) -> Bound:
        """Return what reduces a symmetric tensor; `_output` is where the result goes."""
        raise NotImplementedError


def _world() -> Any:
    return dist.group.WORLD


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


GPU_LIBRARIES: dict[str, type[Library]] = {
    "fastcoll_gpu": FastcollOnGpu,
    "nccl": Nccl,
    "symm_one_shot": SymmOneShot,
    "symm_two_shot": SymmTwoShot,
}
