# SPDX-License-Identifier: Apache-2.0
"""Every verb gives the oracle's bits, at every site: dtypes, operations, sizes and placements.

The calls are drawn (support/draw.py): at each site, each verb meets every dtype, operation and
algorithm at small sizes, and some at large ones. Below: the sizes at which one node changes its
way, refused calls, and many ranks.
"""

import itertools
from collections.abc import Callable

import pytest
import torch

import fastcoll
from fastcoll import _C
from fastcoll.choose.algorithms.shared import EXCHANGED_INLINE_BYTES, INLINE_BYTES
from tests.support import oracle
from tests.support.calls import MOVES, REDUCTIONS, ROOTED, Call, Place, expected, mixed
from tests.support.draw import (
    IN_ANY_ORDER,
    KINDS_OF_DTYPE,
    PAIRS,
    VERBS,
    algorithms_of,
    calls_of,
    small_sizes,
    some,
)
from tests.support.harness import Pool, Pools, Rank, Setup
from tests.support.perform import check, make
from tests.support.sites import Site, ranks_by_node

MEANINGLESS = [
    (dtype, op) for dtype in oracle.DTYPES for op in oracle.OPS if op not in oracle.ops_of(dtype)
]
HUGE_SIZE = (1 << 20) + 3


@pytest.mark.parametrize("verb", VERBS)
def test_every_dtype_and_operation(site: Site, verb: str) -> None:
    site.check(site.small_calls(verb))


@pytest.mark.parametrize("verb", VERBS)
def test_large_calls(site: Site, verb: str) -> None:
    site.check(site.large_calls(verb), batch=8)


def test_the_generator_covers_every_call() -> None:
    calls = [call for verb in VERBS for call in calls_of(verb, 4, small_sizes(4), 2)]
    for verb in VERBS:
        mine = [call for call in calls if call.verb == verb]
        assert {call.dtype for call in mine} == set(oracle.DTYPES)
        assert {call.numel for call in mine} == set(small_sizes(4))
        assert {call.root for call in mine} == (set(range(4)) if verb in ROOTED else {0})
        if verb in REDUCTIONS:
            assert {(call.dtype, call.op, call.algorithm) for call in mine} == {
                (*pair, algorithm) for pair in PAIRS for algorithm in algorithms_of(verb)
            }
    kinds = ("private", "symmetric", "strided", "numpy")
    spots = [spot for call in calls for spot in call.places]
    assert {(one.kind, one.output.kind) for one in spots} == set(itertools.product(kinds, kinds))


def test_another_order_of_the_nodes_is_seen() -> None:
    """Negative control: the oracle tells rank order from node order."""
    call = Call("all_reduce", "float32", 4099)
    flat, by_node = (expected(call, 4, nodes)[0] for nodes in (None, ranks_by_node("abab")))
    assert (flat != by_node).any()


def boundaries() -> list[int]:
    """Bytes at which the library changes its way: in the flag line, segments, slots, all slots."""
    slots = _C.K_SLOT_BYTES * _C.K_NUM_SLOTS
    return [EXCHANGED_INLINE_BYTES, INLINE_BYTES, 32 << 10, 128 << 10, _C.K_SLOT_BYTES, slots]


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
    assert {("float32", "BAND"), ("bool", "AVG"), ("complex64", "MAX")} < {*MEANINGLESS}
    assert pools(world).run(refuse, MEANINGLESS) == [[]] * world
    check(pools(world), some(calls_of("all_reduce", world, [5]), 60, world))


def ask_for_another_order(rank: Rank, algorithm: str, pairs: list[tuple[str, str]]) -> list[str]:
    wrong = []
    for dtype, op in pairs:
        tensor = torch.ones(8, dtype=getattr(torch, dtype))
        try:
            make(rank.comm, Call("all_reduce", dtype, 8, op, algorithm), tensor, tensor)
            wrong.append(f"{algorithm} {op} of {dtype} was accepted")
        except fastcoll.UnsupportedError as error:
            if not (algorithm in str(error) and 'numerics="fast"' in str(error)):
                wrong.append(f"{algorithm} {op} of {dtype}: {error}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("algorithm", IN_ANY_ORDER)
def test_another_order_is_refused_where_it_matters(
    pools: Pools, algorithm: str, world: int
) -> None:
    pairs = [pair for pair in PAIRS if oracle.order_matters(*pair)]
    assert {dtype for dtype, _ in pairs} == {*oracle.FLOATS, *oracle.COMPLEX}
    assert pools(world).run(ask_for_another_order, algorithm, pairs) == [[]] * world


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_every_size(pools: Pools, world: int, verb: str) -> None:
    """Every size meets every algorithm, and each kind of dtype with all its operations.

    The arithmetic of each dtype meets every size in protocol/native/test_reduce.cpp.
    """
    sizes = small_sizes(world)
    check(pools(world), calls_of(verb, world, sizes, len(sizes), dtypes=KINDS_OF_DTYPE))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_more_large_sizes(pools: Pools, world: int) -> None:
    # Of about as many bytes at each number of ranks. A move knows no dtype but its bytes.
    large, huge = 200 // world, 66 // world
    for verb in REDUCTIONS:
        share = world // 2 if verb == "reduce_scatter" else 1
        sizes = [numel // share | 1 for numel in (16_385, 65_537, 131_071, HUGE_SIZE)]
        check(pools(world), some(calls_of(verb, world, sizes[:2]), large, 1), batch=8)
        check(pools(world), some(calls_of(verb, world, sizes[2:]), huge, 2), batch=2)
    dtypes = oracle.DTYPES if world < 4 else KINDS_OF_DTYPE
    for verb in MOVES:
        check(pools(world), calls_of(verb, world, [HUGE_SIZE // world], dtypes=dtypes), batch=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("verb", VERBS)
def test_sixteen_ranks(pools: Pools, verb: str) -> None:
    check(pools(16), calls_of(verb, 16, small_sizes(16), dtypes=KINDS_OF_DTYPE))


@pytest.mark.slow
def test_sixty_four_ranks(fresh_pool: Callable[..., Pool]) -> None:
    """As many as there may be: a few calls of every kind."""
    pool = fresh_pool(64, Setup(timeout_s=50))
    check(pool, mixed(64, 30, 1), batch=30)
    for verb in REDUCTIONS:
        check(pool, some(calls_of(verb, 64, [1, 64, 700]), 12, 1), batch=12)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_64_mebibytes(pools: Pools, world: int) -> None:
    """A chain of three ranks has a middle."""
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
    psutil = pytest.importorskip("psutil")  # a machine with a GPU may lack it
    if psutil.virtual_memory().available < 8 << 30:
        pytest.skip("needs 8 GiB of memory")
    results = pools(2).run(more_than_32_bits, (1 << 31) + 77, deadline_s=500)
    assert results == [[0, 0]] * 2
