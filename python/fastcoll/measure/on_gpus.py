# SPDX-License-Identifier: Apache-2.0
"""Where `fastcoll tune --device cuda` measures: ranks on GPUs, and the variants to compare there.

Decides whether ranks are processes or threads, and which algorithms run. Knows nothing of tables.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fastcoll.choose import algorithms
from fastcoll.choose.table import NCCL_MOVES
from fastcoll.measure.gpu_libraries import mps_runs
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks
from fastcoll.measure.gpu_variants import ThreadVariants, request_on_gpus
from fastcoll.measure.library import Library
from fastcoll.measure.pattern import Cell
from fastcoll.measure.pool import NotMeasured, Pool, own_pool
from fastcoll.measure.protocol import Reply
from fastcoll.measure.rounds import Contender
from fastcoll.measure.variants import Variant
from fastcoll.measure.worker import Worker
from fastcoll.types import REDUCTIONS

Json = dict[str, Any]


class ThreadRanks:
    """Rank threads that take commands; a `rounds.Contender`."""

    name = "fastcoll"

    def __init__(
        self, devices: Sequence[str], make: Callable[[GpuRank], Library] = ThreadVariants
    ) -> None:
        """Start a rank for each of `devices`.

        Raises:
            NotMeasured: They did not come up.
        """
        try:
            self._ranks = GpuRanks(devices)
            try:
                self._workers = [Worker(library) for library in self._ranks.run(make)]
            except BaseException:
                self._ranks.close()
                raise
        except RuntimeError as error:
            raise NotMeasured(str(error).strip().splitlines()[-1]) from error

    @property
    def is_running(self) -> bool:
        return not self._ranks.failed

    def command(self, text: str) -> list[Reply]:
        """Send one command to every rank; see `Pool.command`."""
        replies: list[Reply] = self._ranks.run(lambda me: self._workers[me.rank].run(text))
        for reply in replies:
            if "error" in reply:
                raise NotMeasured(reply["error"])
        return replies

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._ranks.close()


@dataclass(frozen=True)
class GpuVariant(Variant):
    """One algorithm, as tables call it."""

    num_channels: int = 0

    @property
    def name(self) -> str:
        return self.algorithm

    @property
    def row(self) -> Json:
        are = "threads" if isinstance(self.ranks, ThreadRanks) else "processes"
        return {"ranks_are": are, "num_channels": self.num_channels, "algorithm": self.name}

    def may_fail_for(self, reason: str) -> bool:
        """Whether the rest is measured without it: NCCL may not run here, for its own reasons."""
        return self.name.startswith("nccl") and not reason.startswith("wrong result")


class OnGpus:
    """Where `fastcoll tune --device cuda` measures."""

    def __init__(self, num_gpus: int, folder: Path, own_rank: int | None) -> None:
        """Measure with ranks of this process's making.

        Args:
            num_gpus: How many this process sees.
            folder: See above.
            own_rank: The one rank to start, where torchrun's processes start the others.
        """
        # Algorithms that could not be measured, with the first reason.
        self.left_out: dict[str, str] = {}
        self._num_gpus = num_gpus
        self.folder = folder  # an empty folder for sockets; its path must be short
        self._own_rank = own_rank

    def point(self, cell: Cell) -> Json:
        """Return the fields that tell a cell from others, before any rank runs."""
        return {
            "verb": cell.verb,
            "world_size": cell.world_size,
            "ranks_per_gpu": -(-cell.world_size // self._num_gpus),
            "size_bytes": request_on_gpus(cell, {}).staged_bytes,
        }

    def are_threads(self, world_size: int) -> bool:
        """Whether ranks are threads: processes that share a GPU take turns, except under MPS."""
        return world_size > self._num_gpus and self._own_rank is None and not mps_runs()

    def running(self, world_size: int) -> AbstractContextManager[Contender]:
        """Start ranks that take any variant: a process on each GPU, else threads that share some.

        They run inside of the `with`.

        Raises:
            NotMeasured: A rank did not come up.
        """
        if self.are_threads(world_size):
            return ThreadRanks([f"cuda:{rank % self._num_gpus}" for rank in range(world_size)])
        return self.pool(world_size)

    def pool(self, world_size: int) -> Pool:
        """Return ranks that are processes, not started."""
        ranks = None if self._own_rank is None else [self._own_rank]
        return own_pool("fastcoll_gpu_variants", world_size, self.folder, ranks)

    def variants(self, ranks: Contender, cell: Cell) -> list[GpuVariant]:
        """Return every algorithm that runs a cell, NCCL's two ways to reduce among them."""
        terms = ranks.command("terms")[0]
        terms.pop("idle_cpu_s")
        request = request_on_gpus(cell, terms)
        names = [one.name for one in algorithms.ALL if one.admits(request) is None]
        for name, without in (("nccl", "no_nccl"), ("multimem", "no_multicast")):
            if terms[without]:
                self.left_out.setdefault(name, terms[without])
        if "nccl" in names and request.verb in REDUCTIONS:
            names.append(NCCL_MOVES)
        return [GpuVariant(ranks, name, num_channels=request.num_channels) for name in names]

    def leave_out(self, variant: GpuVariant, reason: str) -> None:
        """Note that a variant could not be measured."""
        self.left_out.setdefault(variant.name, reason)
