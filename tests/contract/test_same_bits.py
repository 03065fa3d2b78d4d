# SPDX-License-Identifier: Apache-2.0
"""The bits of a reduction depend on the inputs and the order of the ranks, on nothing else.

Decides what is varied: the SIMD level, and the caller's flush to zero. Algorithms, sizes and
places have the oracle's bits in test_values.py.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from fastcoll import _C
from tests.support import oracle
from tests.support.calls import Call, Place
from tests.support.harness import Pools, Rank
from tests.support.perform import perform_all


def with_levels(rank: Rank, calls: list[Call], levels: list[str]) -> list[tuple[np.ndarray, str]]:
    """Run calls on the SIMD level that is this rank's turn."""
    _C.set_simd_level(levels[rank.rank % len(levels)])
    try:
        return perform_all(rank, calls)
    finally:
        _C.set_simd_level(_C.simd_levels()[0])


def levels_here(rank: Rank) -> list[str]:
    return list(_C.simd_levels())


def test_the_simd_level_does_not_matter(pools: Pools) -> None:
    """Each level alone, then another level on each rank, whatever the ops and dtypes."""
    world = 3
    levels = pools(world).run(levels_here)[0]
    assert levels[-1] == "baseline"
    pairs = [(dtype, op) for dtype in oracle.DTYPES for op in oracle.ops_of(dtype)]
    # Odd offsets and sizes, so that heads and tails of the vector loops are taken too.
    calls = [
        Call("all_reduce", dtype, numel, op, algorithm, places=(Place("private", 3),), seed=number)
        for number, (dtype, op) in enumerate(pairs)
        for numel, algorithm in ((1003, "one_shot"), (331, "chain"))
    ]
    first, *others = (
        pools(world).run(with_levels, calls, used)
        for used in [*([level] for level in levels), levels, levels[::-1]]
    )
    for results in others:
        for row, reference in zip(results, first, strict=True):
            for (words, problem), (wanted, _), call in zip(row, reference, calls, strict=True):
                assert np.array_equal(words, wanted), call
                assert not problem


def flushing(rank: Rank, calls: list[Call]) -> Any:
    """Run calls in a thread that flushes subnormals to zero on every second rank."""
    least = torch.tensor([1e-45])
    if not torch.set_flush_denormal(rank.rank % 2 == 0):
        return None
    try:
        results = perform_all(rank, calls)
        flushed = bool((least * 1.0 == 0).item())
    finally:
        torch.set_flush_denormal(False)
    return results, flushed


def test_the_callers_flush_to_zero_does_not_matter(pools: Pools) -> None:
    world = 3
    calls = [
        Call(verb, dtype, 1500, op, algorithm, seed=2)
        for verb, dtype, op, algorithm in itertools.product(
            ("all_reduce", "reduce_scatter"),
            oracle.FLOATS,
            ("SUM", "AVG", "PRODUCT", "MIN"),
            ("auto", "two_shot"),
        )
    ]
    kept = pools(world).run(perform_all, calls)
    answers = pools(world).run(flushing, calls)
    if answers == [None] * world:
        pytest.skip("this CPU can't flush subnormals to zero")
    for rank, (results, flushed) in enumerate(answers):
        assert flushed == (rank % 2 == 0)  # the caller's own setting is back after the calls
        for (words, _), (wanted, _), call in zip(results, kept[rank], calls, strict=True):
            assert np.array_equal(words, wanted), call
