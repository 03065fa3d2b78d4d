# SPDX-License-Identifier: Apache-2.0
"""Ranks on GPUs: threads of this process, which run together even on one GPU, or processes.

Decides which GPU a rank has and how long a group of threads lives. Of those that tests share there
is one at a time, as each claims its share of the device.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastcoll.machine import gpu
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks
from tests.support.harness import Rank

needs_gpu_part = pytest.mark.skipif(
    "built without" in gpu.problem(), reason="not run: this build has no GPU part (no nvcc)"
)


def start_threads(pools: str, world_size: int, timeout_s: float) -> GpuRanks:
    """Start rank threads on one GPU or on all of them, by a name of `sites.placements`."""
    num_gpus = 1 if pools == "one_gpu" else torch.cuda.device_count()
    return GpuRanks([f"cuda:{rank % num_gpus}" for rank in range(world_size)], timeout_s)


class ThreadGroups:
    """The group of rank threads that tests share now; another one takes its place."""

    def __init__(self) -> None:
        self._kind: tuple[str, int, float] | None = None
        self._ranks: GpuRanks | None = None

    def __call__(self, pools: str, world_size: int, timeout_s: float = 30.0) -> GpuRanks:
        kind = (pools, world_size, timeout_s)
        if self._ranks is None or self._ranks.failed or self._kind != kind:
            self.close()
            self._kind, self._ranks = kind, start_threads(*kind)
        return self._ranks

    def close(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()


class ThreadPool:
    """Rank threads in the place of a harness.Pool; they work while `start` runs."""

    def __init__(self, ranks: GpuRanks) -> None:
        self.world_size, self.run = ranks.world_size, ranks.run
        self._results: list[Any] = []

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self._results = self.run(function, *args)

    def finish(self) -> list[Any]:
        return self._results


def as_gpu_rank(rank: Rank) -> GpuRank:
    """Give a rank that is a process its GPU."""
    device = torch.device("cuda", rank.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    stream = torch.cuda.current_stream(device)
    return GpuRank(rank.rank, rank.world_size, device, rank.comm, stream)
