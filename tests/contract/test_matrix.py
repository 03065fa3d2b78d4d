# SPDX-License-Identifier: Apache-2.0
"""Every verb, dtype, operation, size, world, placement and algorithm, against the oracle.

The cases are generated: each (dtype, operation) meets each algorithm in each world; sizes and
placements take turns; every size meets everything on 2 and 3 ranks, in the slow part of the file.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from tests.proofs import CPP, controls
from tests.support import oracle
from tests.support.calls import MOVES, NUMPY_DTYPES, REDUCTIONS, ROOTED, Call, Place, mixed
from tests.support.harness import Pool, Pools, Rank, Setup
from tests.support.perform import check, make

WORLDS = (3, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 2, 4, 5, 8)))
ALGORITHMS = ("auto", "one_shot", "two_shot", "ring", "chain")


def algorithms_of(verb: str) -> tuple[str, ...]:
    if verb == "reduce":
        return ALGORITHMS[:3]
    return ALGORITHMS if verb in REDUCTIONS else ("auto",)


PAIRS = [(dtype, op) for dtype in oracle.DTYPES for op in oracle.ops_of(dtype)]
MEANINGLESS = [
    (dtype, op) for dtype in oracle.DTYPES for op in oracle.OPS if op not in oracle.ops_of(dtype)
]


def small_sizes(world: int) -> list[int]:
    return [0, 1, 2, 3, world - 1, world, world + 1, 7, 16, 17, 63, 511, 513, 1000, 2049, 4097]


LARGE_SIZES = (16_385, 32_771, 65_537, 131_071, 262_147)
HUGE_SIZE = (1 << 20) + 3


OFFSETS = (0, 0, 1, 2, 3, 4, 7, 8, 13, 16, 64)


def place(rng: np.random.Generator, dtype: str) -> Place:
    kinds = ["private", "private", "symmetric", "strided"]
    if dtype in NUMPY_DTYPES:
        kinds.append("numpy")
    one, other = (
        Place(kinds[rng.integers(len(kinds))], int(rng.choice(OFFSETS))) for _ in range(2)
    )
    return replace(one, in_place=one.kind != "strided" and bool(rng.integers(2)), output=other)


def places(rng: np.random.Generator, dtype: str) -> tuple[Place, ...]:
    """One for all ranks, or one each."""
    return tuple(place(rng, dtype) for _ in range(8 if rng.integers(3) == 0 else 1))


def reductions(world: int, sizes: list[int], rounds: int) -> Iterator[Call]:
    """Each pair, verb and algorithm `rounds` times, with sizes and placements taking turns."""
    rng = np.random.default_rng(world)
    turn = itertools.count()
    for _ in range(rounds):
        for (dtype, op), verb, algorithm in itertools.product(PAIRS, REDUCTIONS, ALGORITHMS):
            if algorithm not in algorithms_of(verb):
                continue
            numel = sizes[next(turn) % len(sizes)]
            numerics = "fast" if algorithm == "ring" and oracle.order_matters(dtype, op) else None
            # The second call of its kind takes the library's short way.
            for _ in range(2 if algorithm == "auto" else 1):
                seed = int(rng.integers(100_000))
                spots = places(rng, dtype)
                root = int(rng.integers(world)) if verb == "reduce" else 0
                yield Call(verb, dtype, numel, op, algorithm, numerics, root, spots, seed)


def moves(world: int, sizes: list[int], rounds: int) -> Iterator[Call]:
    rng = np.random.default_rng(100 + world)
    turn = itertools.count()
    for _ in range(rounds):
        for dtype, verb in itertools.product(oracle.DTYPES, MOVES):
            numel = sizes[next(turn) % len(sizes)]
            for root in range(world if verb in ROOTED else 1):
                seed = int(rng.integers(100_000))
                yield Call(verb, dtype, numel, root=root, places=places(rng, dtype), seed=seed)


def some(cases: Iterator[Call], count: int, seed: int) -> list[Call]:
    """A random choice that is the same in every run."""
    every = list(cases)
    rng = np.random.default_rng(seed)
    return [every[index] for index in sorted(rng.choice(len(every), count, replace=False))]


def test_the_generator_covers_what_it_says() -> None:
    cases = list(reductions(4, small_sizes(4), 1)) + list(moves(4, small_sizes(4), 2))
    assert {call.dtype for call in cases} == set(oracle.DTYPES)
    assert {(call.dtype, call.op, call.algorithm) for call in cases} >= {
        (*pair, algorithm) for pair in PAIRS for algorithm in ALGORITHMS
    }
    assert {call.numel for call in cases} >= set(small_sizes(4))
    for verb in ROOTED:
        assert {call.root for call in cases if call.verb == verb} == {0, 1, 2, 3}
    kinds = ("private", "symmetric", "strided", "numpy")
    spots = [spot for call in cases for spot in call.places]
    assert {(one.kind, one.output.kind) for one in spots} == set(itertools.product(kinds, kinds))


MOVE_ROUNDS = 3


def small_reductions(world: int) -> list[Call]:
    return list(reductions(world, small_sizes(world), 1))


def small_moves(world: int) -> list[Call]:
    return list(moves(world, small_sizes(world), MOVE_ROUNDS))


def beyond(calls: Iterator[Call], first: list[Call]) -> list[Call]:
    """The calls that come after the first ones."""
    every = list(calls)
    assert every[: len(first)] == first
    return every[len(first) :]


@pytest.mark.parametrize("world", WORLDS)
def test_small_reductions(pools: Pools, world: int) -> None:
    assert check(pools(world), small_reductions(world)) > 1000


@pytest.mark.parametrize("world", WORLDS)
def test_small_moves(pools: Pools, world: int) -> None:
    assert check(pools(world), small_moves(world)) > 100


@pytest.mark.parametrize("world", WORLDS)
def test_large_calls(pools: Pools, world: int) -> None:
    """Fewer of the larger sizes: every dtype, every algorithm, not every pair of them."""
    cases = reductions(world, list(LARGE_SIZES[: 5 if world < 5 else 2]), 1)
    check(pools(world), some(cases, 40, world), batch=8)
    check(pools(world), some(moves(world, [LARGE_SIZES[1]], 1), 8, world), batch=8)


def boundaries() -> list[int]:
    """Bytes at which the library changes its way: in the flag line, segments, slots, all slots."""
    from fastcoll import _C
    from fastcoll.choose.algorithms.shared import INLINE_BYTES

    slots = _C.K_SLOT_BYTES * _C.K_NUM_SLOTS
    return [INLINE_BYTES, 32 << 10, 128 << 10, _C.K_SLOT_BYTES, slots]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_element_around_the_boundaries(pools: Pools, world: int) -> None:
    calls = []
    for num_bytes, verb in itertools.product(boundaries(), (*REDUCTIONS, *MOVES)):
        algorithms = algorithms_of(verb)
        for algorithm, dtype in zip(algorithms, itertools.cycle(("int32", "uint8")), strict=False):
            parts = world if verb in ("reduce_scatter", "scatter", "all_to_all") else 1
            middle = num_bytes // oracle.itemsize(dtype) // parts
            for numel in (middle - 1, middle, middle + 1, middle + world):
                spots = (Place("private", numel % 3), Place("symmetric", 1, output=Place()))
                calls.append(Call(verb, dtype, numel, "SUM", algorithm, places=spots, seed=numel))
    check(pools(world), calls, batch=20)


def refuse(rank: Rank, pairs: list[tuple[str, str]]) -> list[str]:
    """Ask for reductions that mean nothing; what was wrong with the answers."""
    import fastcoll

    wrong = []
    for (dtype, op), verb in itertools.product(pairs, REDUCTIONS):
        one = torch.zeros(rank.world_size, dtype=getattr(torch, dtype))
        part = one[:1].clone() if verb == "reduce_scatter" else one
        try:
            make(rank.comm, Call(verb, dtype, one.numel(), op), one, part)
            wrong.append(f"{verb} {op} of {dtype} was accepted")
        except fastcoll.UnsupportedError as error:
            if not (op in str(error) and dtype in str(error) and "SUM" in str(error)):
                wrong.append(f"{verb} {op} of {dtype}: {error}")
    return wrong


@pytest.mark.parametrize("world", [1, 3])
def test_what_means_nothing_is_refused_and_does_no_harm(pools: Pools, world: int) -> None:
    assert len(MEANINGLESS) == 39
    assert pools(world).run(refuse, MEANINGLESS) == [[]] * world
    check(pools(world), some(reductions(world, [5], 1), 60, world))


def ask_for_a_ring(rank: Rank, pairs: list[tuple[str, str]]) -> list[str]:
    import fastcoll

    wrong = []
    for dtype, op in pairs:
        tensor = torch.ones(8, dtype=getattr(torch, dtype))
        try:
            make(rank.comm, Call("all_reduce", dtype, 8, op, "ring"), tensor, tensor)
            wrong.append(f"ring {op} of {dtype} was accepted")
        except fastcoll.UnsupportedError as error:
            if not ("ring" in str(error) and "chain" in str(error)):
                wrong.append(f"ring {op} of {dtype}: {error}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_a_plain_ring_is_refused_where_order_matters(pools: Pools, world: int) -> None:
    pairs = [pair for pair in PAIRS if oracle.order_matters(*pair)]
    assert len(pairs) == 6 * 3 + 2 * 2
    assert pools(world).run(ask_for_a_ring, pairs) == [[]] * world


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", WORLDS)
def test_every_size(pools: Pools, world: int) -> None:
    """Every size meets everything in worlds of 2 and 3; in the others, everything meets three.

    The first rounds are those of the tests above.
    """
    sizes = small_sizes(world)
    rounds = len(sizes) if world in (2, 3) else 3
    check(pools(world), beyond(reductions(world, sizes, rounds), small_reductions(world)))
    if rounds > MOVE_ROUNDS:
        check(pools(world), beyond(moves(world, sizes, rounds), small_moves(world)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 3, *controls((4, 8))])
def test_more_large_sizes(pools: Pools, world: int) -> None:
    check(pools(world), some(reductions(world, [16_385, 65_537], 1), 300, 1), batch=8)
    check(pools(world), some(reductions(world, [*LARGE_SIZES, HUGE_SIZE], 1), 100, 2), batch=2)
    check(pools(world), moves(world, [HUGE_SIZE // world], 1), batch=2)


@pytest.mark.proof(*CPP)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sixteen_ranks(pools: Pools) -> None:
    check(pools(16), reductions(16, small_sizes(16), 1))
    check(pools(16), moves(16, small_sizes(16), 1))


@pytest.mark.slow
def test_sixty_four_ranks(fresh_pool: Callable[..., Pool]) -> None:
    """As many as there may be: a few calls of every kind."""
    pool = fresh_pool(64, Setup(timeout_s=50))
    check(pool, mixed(64, 60, 1), batch=20)
    check(pool, some(reductions(64, [1, 64, 700], 1), 60, 1), batch=10)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_64_mebibytes(pools: Pools, world: int) -> None:
    spots = (Place("private", 4), Place("private", 1, in_place=True))
    for algorithm in ("auto", "chain"):
        call = Call("all_reduce", "float32", 1 << 24, "SUM", algorithm, places=spots, seed=5)
        check(pools(world), [call])


def more_than_32_bits(rank: Rank, numel: int) -> list[int]:
    """One message of more than 2^31 elements; some of them, and how many are wrong."""
    tensor = torch.full((numel,), rank.rank + 1, dtype=torch.uint8)
    tensor[::65_537] = 40 + rank.rank
    rank.comm.all_reduce(tensor)
    marks = int((tensor[::65_537] != 81).sum())
    tensor[::65_537] = 3
    # In parts: a comparison of all of it would need as much memory again.
    return [marks, sum(int((part != 3).any()) for part in tensor.split(1 << 26))]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_than_32_bits(pools: Pools) -> None:
    if psutil.virtual_memory().available < 8 << 30:
        pytest.skip("needs 8 GiB of memory")
    results = pools(2).run(more_than_32_bits, (1 << 31) + 77, deadline_s=500)
    assert results == [[0, 0]] * 2
