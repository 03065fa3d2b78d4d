# SPDX-License-Identifier: Apache-2.0
"""The ways to carry out one call, side by side on the same ranks and tensors.

Decides which algorithms and segment sizes there are to compare. Knows nothing of tables.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcoll.choose import algorithms
from fastcoll.machine import cpu
from fastcoll.machine.cpu import cpu_quota
from fastcoll.measure.library import WorkerConfig
from fastcoll.measure.pattern import Cell
from fastcoll.measure.pool import Pool, available_cpus, own_commands
from fastcoll.measure.protocol import Reply
from fastcoll.types import Numerics, Request, SingleCopy

# What has most to choose comes first: an interrupted run is worth most so. A barrier, a send and a
# recv can be carried out in one way only.
VERBS = (
    "all_reduce",
    "reduce_scatter",
    "reduce",
    "all_gather",
    "broadcast",
    "all_to_all",
    "gather",
    "scatter",
)
SEGMENTS_BYTES = (64 << 10, 128 << 10, 256 << 10)
_ONE_SEGMENT_BYTES = 128 << 10
# Below, a message is one segment whatever its size may be.
_LEAST_SEGMENTED_BYTES = 64 << 10


@dataclass(frozen=True)
class Variant:
    """One algorithm and segment size on the ranks of `pool`; a `rounds.Contender`."""

    pool: Pool
    algorithm: str
    segment_bytes: int

    @property
    def name(self) -> str:
        """As outcomes call it."""
        return f"{self.algorithm}/{self.segment_bytes >> 10}K"

    @property
    def row(self) -> dict[str, Any]:
        """What a table's row says of it."""
        return {"algorithm": self.algorithm, "segment_bytes": self.segment_bytes}

    def is_excused(self, reason: str) -> bool:
        """Whether the rest is measured without it: only ranks know if they read each other."""
        return self.algorithm == "single_copy" and reason.startswith("UnsupportedError")

    @property
    def is_running(self) -> bool:
        """Whether the ranks answer."""
        return self.pool.is_running

    def command(self, text: str) -> list[Reply]:
        """Send one command to every rank, as something to do with this algorithm."""
        if text != "release":
            self.pool.command(f"choose {self.algorithm} {self.segment_bytes}")
        return self.pool.command(text)


def cpus_between(world_size: int) -> int:
    """Return how many CPUs the ranks of `running_ranks` have between them."""
    return min(world_size, len(available_cpus()), cpu_quota())


def request_of(
    cell: Cell, numerics: Numerics, algorithm: str = "auto", single_copy: SingleCopy = "never"
) -> Request:
    """Return what all ranks of `running_ranks` know of a cell's call."""
    return cell.request(
        algorithm=algorithm,
        numerics=numerics,
        num_cpus=cpus_between(cell.world_size),
        single_copy=single_copy,
        cpu_vendor=cpu.vendor(),
    )


def variants_of(pool: Pool, cell: Cell) -> list[Variant]:
    """Return every algorithm that runs a cell, at every segment size that makes a difference.

    reduce_scatter has one shot only: its one_shot is two_shot, and is left out, but where it
    travels with its flags.
    """
    request = request_of(cell, "fast", single_copy="auto")
    segmented = request.staged_bytes > _LEAST_SEGMENTED_BYTES
    return [
        Variant(pool, candidate.name, segment_bytes)
        for candidate in algorithms.ALL
        if candidate.admits(request) is None
        and (
            (cell.verb, candidate.name) != ("reduce_scatter", "one_shot")
            or candidate.plan(request).inline
        )
        for segment_bytes in (
            SEGMENTS_BYTES
            if segmented and candidate.name != "single_copy"  # stages nothing
            else (_ONE_SEGMENT_BYTES,)
        )
    ]


@contextmanager
def running_ranks(world_size: int, folder: Path) -> Iterator[Pool]:
    """Start ranks that take any variant, each on a core of its own where there are enough.

    Raises:
        NotMeasured: A rank did not come up.
    """
    cpus = available_cpus()
    config = WorkerConfig(
        library="fastcoll_variants",
        world_size=world_size,
        socket_path=str(folder / f"{world_size}.sock"),
        store_path=str(folder / f"{world_size}.store"),
        cpus=cpus[:world_size] if world_size <= len(cpus) else None,
    )
    commands = own_commands(config, list(range(world_size)))
    pool = Pool("fastcoll", world_size, config.socket_path, commands)
    pool.start()
    try:
        yield pool
    finally:
        pool.close()
