# SPDX-License-Identifier: Apache-2.0
"""The Triton algorithms give the oracle's bits, over many calls on one workspace.

Decides what is called in which sequence. Runs by the interpreter, which executes the same source
one program after the other. The interpreter sees wrong values, lost signals and hangs, but no error
of memory order and no race between the threads of a block.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support import oracle
from tests.triton import ranks
from tests.triton.ranks import Case, Perform

pytestmark = [pytest.mark.proof("kernels"), pytest.mark.long]

WAYS = (
    ("one_shot", "all_reduce"),
    ("two_shot", "all_reduce"),
    ("two_shot", "reduce_scatter"),
)
# A tile has 64 elements: none, one, odd, a pack and a tile and one more or less, several segments.
SIZES = (0, 1, 7, 15, 16, 17, 63, 64, 65, 333, 1001)


def expected(case: Case, world: int, rank: int) -> np.ndarray:
    words = [ranks.words_in(case.dtype, case.numel, peer, case.seed) for peer in range(world)]
    result = oracle.reduce(words, case.dtype, case.op, world)
    return result if case.verb == "all_reduce" else np.split(result, world)[rank]


def problems(cases: Sequence[Case], reports: Sequence[ranks.Report]) -> list[str]:
    found = []
    for rank, report in enumerate(reports):
        if report.verdict:
            found.append(f"rank {rank}: {report.verdict}")
        for case, got in zip(cases, report.outputs, strict=True):
            want = expected(case, len(reports), rank)
            wrong = np.flatnonzero(got != want)
            if wrong.size:
                at = wrong[0]
                found.append(
                    f"rank {rank}: {wrong.size} of {want.size} wrong, [{at}] is {got[at]:#x}, not "
                    f"{want[at]:#x}; {case}"
                )
    return found


def variety(world: int) -> Iterator[Case]:
    """Every way x dtype, twice; operations, sizes and launches take turns."""
    for turn, (dtype, (algorithm, verb)) in enumerate(itertools.product(oracle.DTYPES * 2, WAYS)):
        ops = oracle.ops_of(dtype)
        numel = SIZES[turn * 3 % len(SIZES)]
        if verb == "reduce_scatter":
            numel *= world
        yield Case(algorithm, verb, dtype, numel, ops[turn % len(ops)], 64, 1 + turn % 2, turn)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_dtype_and_operation(perform: Perform, world: int) -> None:
    cases = list(variety(world))
    assert problems(cases, perform(world, cases)) == []


@pytest.mark.slow
def test_messages_longer_than_scratch(perform: Perform) -> None:
    """Several segments, and the buffers alternate over calls of different algorithms."""
    numel = 15_011
    whole = [Case(*WAYS[way], "float32", numel, "SUM", 1024, 2, way) for way in (0, 1, 1, 0)]
    cases = [*whole, Case(*WAYS[2], "float32", 2 * numel, "SUM", 1024, 2, 2)]
    assert problems(cases, perform(2, cases)) == []


def test_reduce_has_every_dtype_and_operation(interpreters: Callable[..., Any]) -> None:
    cases = [
        Case("reduce", "all_reduce", dtype, 333, op, 256, 2, number)
        for number, dtype in enumerate(oracle.DTYPES)
        for op in oracle.ops_of(dtype)
    ]
    outputs = interpreters(2)(ranks.reduce_here, cases, 3)
    for rank, mine in enumerate(outputs):
        for case, got in zip(cases[rank::2], mine, strict=True):
            assert np.array_equal(got, expected(case, 3, 0)), case
