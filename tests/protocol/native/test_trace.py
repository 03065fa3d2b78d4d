# SPDX-License-Identifier: Apache-2.0
"""The compiled algorithms against their schedules: the same bytes, steps and waits.

trace_algorithms.cpp writes down the real copies, reductions and waits. This file counts those of
the model.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fastcoll_model.builders import build as build_schedule
from fastcoll_model.schedule import Copy, Reduce, Schedule, Wait, moved
from tests.proofs import CPP
from tests.protocol.native.test_native import BUILDS, COMPILE_LIMIT_S, PROGRAMS, ROOT
from tests.support.programs import build, run

pytestmark = [pytest.mark.proof(*CPP, "python/fastcoll_model"), pytest.mark.native]

NUMEL = 5040  # of int32, a multiple of all ranks' blocks: for up to 7 ranks and two directions
WORLDS = (2, 3, 5)


@dataclass(frozen=True)
class Case:
    """A compiled algorithm and the schedule it carries out; `meets`: and how it differs."""

    verb: str
    algorithm: str
    schedule: str
    meets: bool = False


# A ring and a chain begin with a meeting of all ranks, for the stamps; the model's don't.
CASES = [
    Case("all_reduce", "one_shot", "one_shot"),
    Case("all_reduce", "two_shot", "two_shot"),
    Case("all_reduce", "ring", "ring", meets=True),
    Case("all_reduce", "chain", "chain", meets=True),
    Case("reduce_scatter", "two_shot", "one_shot"),
    Case("reduce_scatter", "ring", "ring", meets=True),
    Case("reduce", "one_shot", "one_shot"),
    Case("all_gather", "direct", "direct"),
    Case("broadcast", "direct", "direct"),
    Case("gather", "direct", "direct"),
    Case("scatter", "direct", "direct"),
    Case("all_to_all", "direct", "direct"),
]


@dataclass(frozen=True)
class Counts:
    """The transfers and waits of one rank.

    Attributes:
        bytes_from: Bytes that it gets from each rank.
        num_moves: Its copies and reductions of other ranks' bytes.
        waits_for: How often it waits for each rank.
    """

    bytes_from: dict[int, int]
    num_moves: int
    waits_for: dict[int, int]


def modelled(schedule: Schedule, message_bytes: int) -> list[Counts]:
    block_bytes = message_bytes // schedule.num_blocks
    taken = [Counter[int]() for _ in range(schedule.world_size)]
    waits = [Counter[int]() for _ in range(schedule.world_size)]
    num_moves = [0] * schedule.world_size
    for rank in range(schedule.world_size):
        for channel in range(schedule.num_channels):
            for step in schedule.program(rank, channel):
                if isinstance(step, Wait):
                    waits[rank][step.rank] += step.rank != rank
                if not isinstance(step, Copy | Reduce):
                    continue
                # The rank that gets the bytes counts as their mover, also if a peer holds the step.
                for source, destination in moved(step):
                    taken[destination.rank][source.rank] += source.num_blocks * block_bytes
                for getter in {destination.rank for _, destination in moved(step)}:
                    num_moves[getter] += 1
    return [
        Counts(dict(+taken[rank]), num_moves[rank], dict(+waits[rank]))
        for rank in range(schedule.world_size)
    ]


def traced(program: Path, case: Case, world: int, *options: str) -> list[Counts]:
    parts = case.verb in ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
    numel = NUMEL // world if parts else NUMEL
    words = [str(program), str(world), case.verb, case.algorithm, str(numel), *options]
    done = run(words, 60)
    assert done.returncode == 0, done.stdout
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return [
        Counts(
            {peer: size for peer, size in enumerate(row["read_bytes"]) if size and peer != rank},
            row["num_moves"],
            {peer: count for peer, count in enumerate(row["num_waits"]) if count},
        )
        for rank, row in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("trace") / "trace_algorithms"
    others = ("csrc/cpu/strided.cpp", *PROGRAMS["test_p2p"])
    sources = [ROOT / name for name in ("tests/protocol/native/trace_algorithms.cpp", *others)]
    flags = ["-std=c++20", "-pthread", "-O1", "-fno-builtin-memcpy", "-Wall", "-Wextra", "-Werror"]
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'kernels'}"]
    build([BUILDS["plain"].compiler, *flags, *includes], sources, target, COMPILE_LIMIT_S)
    return target


def met(counts: Counts, rank: int, world: int) -> Counts:
    """Return the counts with a meeting of all ranks before the call."""
    waits = {peer: 1 + counts.waits_for.get(peer, 0) for peer in range(world) if peer != rank}
    return Counts(counts.bytes_from, counts.num_moves, waits)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.verb}-{case.algorithm}")
def test_the_compiled_algorithm_does_what_its_schedule_says(
    case: Case, world: int, program: Path
) -> None:
    want = modelled(build_schedule(case.verb, case.schedule, world), NUMEL // world * world * 4)
    if case.meets:
        want = [met(counts, rank, world) for rank, counts in enumerate(want)]
    assert traced(program, case, world) == want


def test_a_copy_that_is_missing_is_noticed(program: Path) -> None:
    want = modelled(build_schedule("all_reduce", "two_shot", 3), NUMEL * 4)
    found = traced(program, CASES[1], 3, "lose")
    assert found[1:] == want[1:]
    assert found[0].num_moves < want[0].num_moves
    assert found[0].bytes_from != want[0].bytes_from
