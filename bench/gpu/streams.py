# SPDX-License-Identifier: Apache-2.0
"""Ranks that are streams of this process and share one GPU, for the Triton kernels.

Decides their memory, and the order of steps that must not run while a kernel waits for a rank.
`CudaGroup` starts the CUDA kernels in the same way, so that both may be compared.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastcoll.group.communicator import Communicator
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks, capture_alone
from fastcoll_kernels import signal
from fastcoll_kernels.workspace import SIGNAL_BYTES, Workspace

DEVICE = "cuda"
Body = Callable[[Any], object]  # a rank's part of a call; it gets an entry of `spaces`


class Group:
    """Ranks on one device: their memory, and a stream for each."""

    def __init__(
        self,
        world_size: int,
        limit_s: float = 20.0,
        num_channels: int = 4,
        scratch_bytes: int = 1 << 20,
    ) -> None:
        self.words = torch.zeros(world_size, SIGNAL_BYTES // 4, dtype=torch.int32, device=DEVICE)
        scratch = torch.zeros(world_size, scratch_bytes, dtype=torch.uint8, device=DEVICE)
        self._scratch = scratch
        self.spaces = [
            Workspace(
                _addresses(self.words),
                _addresses(scratch),
                scratch_bytes,
                torch.zeros(3, dtype=torch.int32).pin_memory(),
                rank,
                num_channels=num_channels,
                limit_s=limit_s,
            )
            for rank in range(world_size)
        ]
        self.streams = [torch.cuda.Stream() for _ in self.spaces]
        torch.cuda.synchronize()

    def load(self, call: Body) -> None:
        """Make a call on poisoned words: that compiles and loads its kernels, which end at once."""
        poisoned = torch.zeros_like(self.words)
        poisoned[:, signal.POISON.value] = 1
        table = _addresses(poisoned)
        for space in self.spaces:
            verdict = torch.zeros(3, dtype=torch.int32).pin_memory()
            call(dataclasses.replace(space, signals=table, verdict=verdict))
        torch.cuda.synchronize()

    def run(self, call: Body, who: Sequence[int] | None = None) -> None:
        """Make a call on every rank, and wait for all."""
        self.load(call)
        for rank in range(len(self.spaces)) if who is None else who:
            with torch.cuda.stream(self.streams[rank]):
                call(self.spaces[rank])
        torch.cuda.synchronize()

    def capture(self, call: Body, times: int) -> list[Callable[[], None]]:
        """Capture calls on every rank; return their replays, in each rank's stream."""
        self.load(call)
        replays = [
            capture(stream, lambda space=space: [call(space) for _ in range(times)])
            for space, stream in zip(self.spaces, self.streams, strict=True)
        ]
        # A graph gets its resources of the device at its first launch.
        self.words[:, signal.POISON.value] = 1
        self.replay(replays)
        self.words.zero_()
        for space in self.spaces:
            space.verdict.zero_()
        torch.cuda.synchronize()
        return replays

    def replay(self, replays: Sequence[Callable[[], None]]) -> list[float]:
        """Replay every rank's graph and wait for all; return each rank's milliseconds."""
        torch.cuda.synchronize()
        marks = []
        for stream, replay in zip(self.streams, replays, strict=True):
            with torch.cuda.stream(stream):
                marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
                marks[-1][0].record(stream)
                replay()
                marks[-1][1].record(stream)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in marks]


@dataclasses.dataclass(frozen=True)
class CudaSpace:
    """A rank of a `CudaGroup`."""

    rank: int
    comm: Communicator

    def broken(self) -> None:
        """Raise the error that broke the group, if any."""
        self.comm.check()


class CudaGroup(Group):
    """Ranks that came up as threads; then one thread starts the kernels of all."""

    def __init__(self, world_size: int, num_channels: int, limit_s: float = 20.0) -> None:
        os.environ["FASTCOLL_GPU_CHANNELS"] = str(num_channels)
        self._threads = GpuRanks(["cuda:0"] * world_size, timeout_s=limit_s)
        self._ranks = self._threads.run(lambda me: me)
        self.spaces: list[Any] = [CudaSpace(me.rank, me.comm) for me in self._ranks]
        self.streams = [me.stream for me in self._ranks]

    def load(self, call: Body) -> None:
        """Do nothing: all kernels were loaded when the ranks came up."""

    def capture(self, call: Body, times: int) -> list[Callable[[], None]]:
        """Capture calls on every rank; return their replays, in each rank's stream."""

        def captured(me: GpuRank, space: CudaSpace) -> Callable[[], None]:
            return capture_alone(me, lambda: [call(space) for _ in range(times)]).replay

        return [captured(*both) for both in zip(self._ranks, self.spaces, strict=True)]

    def close(self) -> None:
        self._threads.close()


def capture(stream: torch.cuda.Stream, body: Callable[[], object]) -> Callable[[], None]:
    """Capture the launches of `body`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    return graph.replay


def _addresses(rows: torch.Tensor) -> torch.Tensor:
    return torch.tensor([row.data_ptr() for row in rows], device=DEVICE)
