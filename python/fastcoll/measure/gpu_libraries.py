# SPDX-License-Identifier: Apache-2.0
"""The calls measured on GPUs, timed by the device's own clock, and fastcoll among the libraries.

Decides how calls are captured, and when a comparison would not be fair: it then says why, and
nothing is timed. The libraries beside fastcoll are in gpu_peers.py.
"""

from collections.abc import Callable
from pathlib import Path

import torch

import fastcoll
from fastcoll import env
from fastcoll.measure.libraries import Fastcoll
from fastcoll.measure.library import Library, WorkerConfig
from fastcoll.measure.pattern import Cell

CALLS_IN_GRAPH = 20  # their launch is one, and costs as much as one call


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
        run, num_calls = self.calls(iterations)
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 * iterations / num_calls

    def calls(self, iterations: int) -> tuple[Callable[[], None], int]:
        """Return a function that makes `iterations` prepared calls or more, and how many."""

        def run() -> None:
            fn, args = self._call
            for _ in range(iterations):
                fn(*args)

        return run, iterations


class InGraph(OnGpu):
    """The same calls as nodes of a captured graph, which is replayed."""

    captures = True
    _graphs: dict[int, torch.cuda.CUDAGraph] | None = None  # by their calls; None: eager

    def prepare(self, cell: Cell) -> int | None:
        # Once eagerly, as the allocations of a library's first call can't be captured.
        self._graphs = None
        num_wrong = super().prepare(cell)
        if not self.captures:
            return num_wrong
        self._graphs = {}
        return super().prepare(cell)

    def release(self) -> None:
        self._graphs = None
        super().release()

    def calls(self, iterations: int) -> tuple[Callable[[], None], int]:
        run, num_calls = super().calls(min(iterations, CALLS_IN_GRAPH))
        if self._graphs is None:
            return super().calls(iterations)
        graph = self._graphs.get(num_calls)
        if graph is None:
            graph = self._graphs[num_calls] = self.capture(run)
        num_replays = -(-iterations // num_calls)

        def replay() -> None:
            for _ in range(num_replays):
                graph.replay()

        return replay, num_replays * num_calls

    def capture(
        self, run: Callable[[], None], stream: torch.cuda.Stream | None = None
    ) -> torch.cuda.CUDAGraph:
        """Return the graph of the work of `run`, captured in `stream` or one of torch's."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, may do as they like meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph


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


class FastcollInGraph(InGraph, FastcollOnGpu):
    """fastcoll in a captured graph."""
