# SPDX-License-Identifier: Apache-2.0
"""The bits of a reduction depend on the inputs and the order of the ranks, on nothing else.

Decides what is varied: algorithm, size, place, stride, SIMD level, thread, the caller's flush to
zero. The library is compared with itself here (with the oracle in test_matrix.py), so a common
mistake of test and oracle can't hide a difference.
"""

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch

import fastcoll
from fastcoll import _C
from tests.support import oracle
from tests.support.calls import Call, Place
from tests.support.draw import IN_RANK_ORDER
from tests.support.harness import Pools, Rank
from tests.support.perform import Started, check, perform_all

SENSITIVE = [name for name in oracle.DTYPES if oracle.order_matters(name, "SUM")]
SIZES = (1, 5, 64, 600, 4100, 9001)
PLACES = (
    Place(),
    Place("private", 3),
    Place("private", 13, in_place=True),
    Place("strided", 1),
    Place("symmetric"),
    Place("symmetric", 5, in_place=True),
)


def variations(dtype: str, op: str) -> list[Call]:
    """The same message, or a part of it from its start, in many ways."""
    places = [(place,) for place in PLACES] + [PLACES]
    ways = itertools.product(IN_RANK_ORDER, SIZES)
    return [
        Call(
            "all_reduce", dtype, numel, op, algorithm, places=places[number % len(places)], seed=11
        )
        for number, (algorithm, numel) in enumerate(ways)
    ]


def assert_prefixes(results: list[list[tuple[np.ndarray, str]]]) -> None:
    """All outputs on all ranks agree as far as they go."""
    outputs = [words for rows in results for words, _ in rows]
    longest = max(outputs, key=len)
    for words in outputs:
        assert np.array_equal(words, longest[: len(words)])
    assert not [problem for rows in results for _, problem in rows if problem]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("dtype", SENSITIVE)
def test_algorithm_size_and_place_do_not_matter(pools: Pools, dtype: str, world: int) -> None:
    for op in ("SUM", "AVG"):
        assert_prefixes(pools(world).run(perform_all, variations(dtype, op)))


def absorb(rank: Rank, algorithm: str, numel: int) -> list[float]:
    """2^24 + 1 - 2^24 over ranks 0, 1, 2 is 0; 2^24 - 2^24 + 1 is 1."""
    results = []
    for values in ((2.0**24, 1.0, -(2.0**24)), (2.0**24, -(2.0**24), 1.0)):
        tensor = torch.full((numel,), values[rank.rank])
        fastcoll.all_reduce(tensor, algorithm=algorithm)
        results += torch.unique(tensor).tolist()
    return results


@pytest.mark.parametrize("algorithm", IN_RANK_ORDER)
def test_sums_run_in_the_order_of_the_ranks(pools: Pools, algorithm: str) -> None:
    for numel in (1, 3, 500, 20_000, 300_000):
        assert pools(3).run(absorb, algorithm, numel) == [[0.0, 1.0]] * 3


@pytest.mark.parametrize("world", [2, 4])
def test_reduce_scatter_gives_the_bits_of_all_reduce(pools: Pools, world: int) -> None:
    for dtype, algorithm in itertools.product(("float32", "bfloat16"), IN_RANK_ORDER):
        numel = 1237
        calls = [
            Call("all_reduce", dtype, numel * world, "SUM", seed=3),
            Call("reduce_scatter", dtype, numel, "SUM", algorithm, seed=3),
        ]
        for rank, rows in enumerate(pools(world).run(perform_all, calls)):
            whole, part = (words for words, _ in rows)
            assert np.array_equal(part, whole[rank * numel : (rank + 1) * numel])


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


def from_a_thread(rank: Rank, call: Call) -> list[np.ndarray]:
    """The same call from the main thread, from another thread, and asynchronously."""
    outputs = [Started(rank.comm, call).result()[0]]
    thread = threading.Thread(target=lambda: outputs.append(Started(rank.comm, call).result()[0]))
    thread.start()
    thread.join()
    return [*outputs, Started(rank.comm, call, async_op=True).result()[0]]


def test_the_thread_does_not_matter(pools: Pools) -> None:
    for dtype, numel in (("float16", 20), ("float32", 40_001)):
        results = pools(2).run(from_a_thread, Call("all_reduce", dtype, numel, seed=9))
        for outputs in results:
            assert len(outputs) == 3
            assert all(np.array_equal(words, results[0][0]) for words in outputs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_one_element_to_64_mebibytes(pools: Pools) -> None:
    """Every prefix length agrees with the longest message's bits."""
    for algorithm in IN_RANK_ORDER:
        sizes = [1, 17, 4099, 262_147, (1 << 20) + 1, 1 << 24]
        calls = [Call("all_reduce", "float32", numel, "SUM", algorithm, seed=1) for numel in sizes]
        assert_prefixes(pools(2).run(perform_all, calls))
    check(pools(2), [Call("all_reduce", "float32", 1 << 24, seed=1)])
