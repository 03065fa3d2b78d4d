# SPDX-License-Identifier: Apache-2.0
"""The ways to carry out one call, side by side on the same ranks and tensors.

Decides which algorithms and segment sizes there are to compare. Knows nothing of tables.
"""

from dataclasses import dataclass
from typing import Any

from fastcoll.choose import algorithms
from fastcoll.machine import cpu
from fastcoll.machine.cpu import cpu_quota
from fastcoll.measure.pattern import Cell, make_cell
from fastcoll.measure.pool import available_cpus
from fastcoll.measure.protocol import Reply
from fastcoll.measure.rounds import Contender
from fastcoll.types import Numerics, Request, SingleCopy

# Verbs with the most algorithms come first: an interrupted run is worth most so. A barrier, a send
# and a recv can be carried out in one way only.
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
# Below, a message is one segment for any segment size.
_LEAST_SEGMENTED_BYTES = 64 << 10


@dataclass(frozen=True)
class Points:
    """The points to measure: every verb, size and number of ranks."""

    worlds: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    verbs: tuple[str, ...] = VERBS
    dtype: str = "float32"

    def cells(self, least_bytes: int = 0) -> list[Cell]:
        """Return the points of at least so many bytes for each rank: by world, verb and size."""
        return [
            make_cell(verb, self.dtype, "sum", size_bytes, world)
            for world in self.worlds
            for verb in self.verbs
            for size_bytes in self.sizes_bytes
            if size_bytes >= world * least_bytes
        ]


@dataclass(frozen=True)
class Variant:
    """One algorithm and segment size on ranks that take any; a `rounds.Contender`."""

    ranks: Contender
    algorithm: str
    segment_bytes: int = 0

    @property
    def name(self) -> str:
        """As outcomes call it."""
        return f"{self.algorithm}/{self.segment_bytes >> 10}K"

    @property
    def row(self) -> dict[str, Any]:
        """The fields of a table's row that name it."""
        return {"algorithm": self.algorithm, "segment_bytes": self.segment_bytes}

    def may_fail_for(self, reason: str) -> bool:
        """Whether the rest is measured without it: only ranks know if they read each other."""
        return self.algorithm == "single_copy" and reason.startswith("UnsupportedError")

    @property
    def is_running(self) -> bool:
        return self.ranks.is_running

    def command(self, text: str) -> list[Reply]:
        """Send one command to every rank, as something to do with this algorithm."""
        if text != "release":
            self.ranks.command(f"choose {self.algorithm} {self.segment_bytes}")
        return self.ranks.command(text)


def request_of(cell: Cell, numerics: Numerics, single_copy: SingleCopy = "never") -> Request:
    """Return the request for a cell's call of fastcoll's own ranks on CPUs."""
    return cell.request(
        algorithm="auto",
        numerics=numerics,
        num_cpus=min(cell.world_size, len(available_cpus()), cpu_quota()),
        single_copy=single_copy,
        cpu_vendor=cpu.vendor(),
    )


def variants_of(ranks: Contender, cell: Cell) -> list[Variant]:
    """Return every algorithm that runs a cell, at every segment size that makes a difference.

    reduce_scatter has one shot only: its one_shot is two_shot, and is left out, but where it
    travels with its flags.
    """
    request = request_of(cell, "fast", single_copy="auto")
    segmented = request.staged_bytes > _LEAST_SEGMENTED_BYTES
    return [
        Variant(ranks, candidate.name, segment_bytes)
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
