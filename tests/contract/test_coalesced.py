# SPDX-License-Identifier: Apache-2.0
"""Lists of tensors in one call: the oracle's bits for each of them, as one call each would give.

Decides the lists: sizes from nothing to several segments, of one dtype or of many, laid out anyhow.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import fastcoll
from tests.support import oracle
from tests.support.backends import TorchGroup
from tests.support.calls import NUMPY_DTYPES, Call, Place, expected
from tests.support.harness import LATE_S, Attempt, Pools, Rank, attempt
from tests.support.perform import Result, Started, compare
from tests.support.sites import Site, ranks_by_node, without_gpu

VERBS = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = (0, 1, 2, 7, 16, 100, 513, 2049)
LARGE_SIZES = (16_385, 65_537)


@dataclasses.dataclass(frozen=True)
class Many:
    """One call on a list; every element stands for what one call on this tensor would be."""

    calls: tuple[Call, ...]
    async_op: bool = False


def start(comm: Any, call: Call, pairs: Sequence[tuple[Any, Any]], async_op: bool = False) -> Any:
    """Make the call on a list that `call` is one tensor of."""
    options: dict[str, Any] = {} if call.algorithm == "auto" else {"algorithm": call.algorithm}
    if call.numerics is not None:
        options["numerics"] = call.numerics
    if async_op:
        options["async_op"] = True
    ins, outs = (list(side) for side in zip(*pairs, strict=True))
    if call.verb == "all_gather":
        return comm.all_gather_into_tensor_coalesced(outs, ins, **options)
    op = getattr(fastcoll.ReduceOp, call.op)
    if call.verb == "reduce_scatter":
        return comm.reduce_scatter_tensor_coalesced(tuple(outs), tuple(ins), op, **options)
    return comm.all_reduce_coalesced(outs, op, **options)


def perform_many(rank: Rank, cases: Sequence[Many]) -> list[Result]:
    results = []
    for many in cases:
        pairs: list[tuple[Any, Any]] = []
        lay = lambda _comm, _call, ins, outs, _async: pairs.append((ins, outs))  # noqa: B023, E731
        tensors = [Started(rank.comm, call, start=lay) for call in many.calls]
        work = start(rank.comm, many.calls[0], pairs, many.async_op)
        if many.async_op and not isinstance(rank.comm, TorchGroup):
            assert [id(one) for one in work.result()] == [id(outs) for _, outs in pairs]
        elif work is not None:
            work.wait()
        results += [tensor.result() for tensor in tensors]
    return results


def check(site: Site, cases: Sequence[Many], perform: Any = perform_many) -> None:
    assert site.pool is not None
    calls = [call for many in cases for call in many.calls]
    site.pool.start(site.in_group, perform, cases)
    nodes = ranks_by_node(site.nodes)
    wants = [expected(call, site.world, nodes) for call in calls]
    problems = compare(calls, wants, site.pool.finish())
    assert not problems, f"{len(problems)} wrong results:\n" + "\n".join(problems[:8])


def draw(
    rng: np.random.Generator, site: Site, verb: str, sizes: Sequence[int], algorithm: str
) -> Many:
    """A list; every other one is of plain tensors only, which takes the library's short way."""
    limits = site.limits
    op = str(rng.choice(oracle.OPS)) if verb != "all_gather" else "SUM"
    dtypes = [
        dtype
        for dtype in oracle.DTYPES
        if op in oracle.ops_of(dtype) and (dtype, op) not in limits.meaningless
    ]
    dtypes = [str(one) for one in rng.choice(dtypes, int(rng.integers(1, 4)))]
    is_plain = bool(rng.integers(2))
    calls = []
    for number in range(int(rng.integers(1, 12))):
        dtype = dtypes[int(rng.integers(len(dtypes)))]
        kinds = ["private"] if is_plain else ["private", "strided"]
        if dtype in NUMPY_DTYPES and not is_plain:
            kinds.append("numpy")
        # The tests have one arena: only one tensor of a list may lie there.
        kind = "symmetric" if number == 3 else str(rng.choice(kinds))
        kind = kind if kind in limits.kinds else "private"
        in_place = verb == "all_reduce" or (kind != "strided" and not is_plain)
        place = (Place(kind, int(rng.choice([0, 1, 3, 8])), in_place),)
        numel, seed = int(rng.choice(sizes)), int(rng.integers(100_000))
        numerics = None if verb == "all_gather" else limits.numerics
        calls.append(Call(verb, dtype, numel, op, algorithm, numerics, places=place, seed=seed))
    return Many(tuple(calls), async_op=not is_plain and bool(rng.integers(2)))


def check_lists(site: Site, seed: int, sizes: Sequence[int], rounds: int) -> None:
    """Draw lists for each verb and algorithm; the second call of a kind has a plan already."""
    rng = np.random.default_rng(seed + site.world)
    cases = [
        draw(rng, site, verb, sizes, algorithm)
        for _ in range(rounds)
        for verb in VERBS
        for algorithm in ("auto", "one_shot", "two_shot")[: 1 if verb == "all_gather" else 3]
        if algorithm in site.limits.algorithms
    ]
    check(site, [again for many in cases for again in (many, many)])


@without_gpu
def test_any_lists(site: Site) -> None:
    check_lists(site, 0, SIZES, 6)


@pytest.mark.parametrize("world", [1, 5])
def test_any_lists_in_other_worlds(pools: Pools, world: int) -> None:
    check_lists(Site(world).on(pools(world)), 0, SIZES, 6)


@without_gpu
def test_lists_of_several_segments(site: Site) -> None:
    check_lists(site, 10, (*SIZES, *LARGE_SIZES), 1)


def asynchronous(rank: Rank) -> list[list[float]]:
    """A call queues the tensors, not the list; and only the first call is checked in Python."""
    tensors = [torch.ones(3), torch.ones(40_000), torch.ones(2, dtype=torch.int32)]
    rank.comm.all_reduce_coalesced(tensors)
    queued = list(tensors)
    rank.comm._checked = None
    try:
        work = rank.comm.all_reduce_coalesced(queued, async_op=True)
    finally:
        del rank.comm._checked
    queued.clear()
    assert [id(one) for one in work.result()] == [id(one) for one in tensors]
    return [tensor.unique().tolist() for tensor in tensors]


@pytest.mark.parametrize("world", [1, 2])
def test_asynchronous_calls(pools: Pools, world: int) -> None:
    assert pools(world).run(asynchronous) == [[[world * world]] * 3] * world


# ---- planted mistakes ----------------------------------------------------------------------------


def spoil_an_element(rank: Rank, cases: Sequence[Many]) -> list[Result]:
    results = perform_many(rank, cases)
    if rank.rank == 1:
        results[2][0][0] ^= 1
    return results


def swap_two_tensors(rank: Rank, cases: Sequence[Many]) -> list[Result]:
    """As if results were brought to the wrong tensors of the list.

    In a group of its own, which knows no plans: C++ makes known calls.
    """
    group = rank.comm.new_group()
    kind = type(group)

    def run_list(self: Any, plan: Any, pieces: list[tuple[int, int, int]], limit_s: float) -> None:
        (a, to_a, numel), (b, to_b, _), *rest = pieces
        swapped = [(a, to_b, numel), (b, to_a, numel), *rest]
        super(kind, self).run_list(plan, swapped, limit_s)

    kind.run_list = run_list
    try:
        return perform_many(dataclasses.replace(rank, comm=group), cases)
    finally:
        del kind.run_list
        group.close()


@pytest.mark.parametrize("mistake", [spoil_an_element, swap_two_tensors])
@pytest.mark.parametrize("verb", VERBS)
def test_a_planted_mistake_is_found(pools: Pools, verb: str, mistake: Any) -> None:
    place = (Place("strided", in_place=verb == "all_reduce"),)
    calls = [Call(verb, "int32", 40, places=place, seed=seed) for seed in range(4)]
    many = Many(tuple(calls))
    site = Site(2).on(pools(2))
    check(site, [many])
    with pytest.raises(AssertionError, match="wrong results"):
        check(site, [many], mistake)


# ---- what the ranks must agree on ----------------------------------------------------------------

Sizes = tuple[tuple[str, int], ...]


def call_list(comm: Any, verb: str, sizes: Sizes, op: str = "SUM") -> None:
    world = comm.world_size
    parts = [torch.ones(numel, dtype=getattr(torch, dtype)) for dtype, numel in sizes]
    wholes = [part.repeat(world) for part in parts]
    pairs = {"all_reduce": (parts, parts), "reduce_scatter": (wholes, parts)}
    pairs["all_gather"] = (parts, wholes)
    call = Call(verb, "float32", 0, op)
    start(comm, call, list(zip(*pairs[verb], strict=True)))


def disagree(rank: Rank, verb: str, usual: Sizes, odd: Sizes) -> list[Attempt]:
    """Twice the same lists, the second time by the short way, then another one on rank 1."""
    group = rank.comm.new_group(timeout_s=15)
    for _ in range(2):
        call_list(group, verb, usual)
    attempts = [attempt(call_list, group, verb, odd if rank.rank == 1 else usual)]
    attempts += [attempt(group.barrier) for _ in range(2)]
    group.close()
    return attempts


USUAL: Sizes = (("float32", 3), ("float32", 4), ("float32", 5))
MIXED: Sizes = (("float32", 3), ("int32", 4), ("float32", 5))
DIFFERENCES: dict[str, tuple[Sizes, Sizes, tuple[str, ...]]] = {
    "order of sizes": (USUAL, (USUAL[1], USUAL[0], USUAL[2]), ("numel=12, 3 tensors",)),
    "a tensor less": (USUAL, USUAL[:2], ("3 tensors", "2 tensors")),
    "an empty tensor more": (USUAL, (*USUAL, ("float32", 0)), ("3 tensors", "4 tensors")),
    "dtype": (USUAL, (*USUAL[:2], ("float64", 5)), ("3 tensors", "2 tensors")),
    "place of a dtype": (MIXED, (MIXED[0], MIXED[2], MIXED[1]), ("float32, numel=8, 2 tensors",)),
    "one tensor": (USUAL, (("float32", 12),), ("3 tensors", "1 tensor ")),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_lists_that_differ(pools: Pools, verb: str, name: str) -> None:
    usual, odd, words = DIFFERENCES[name]
    rows = pools(3).run(disagree, verb, usual, odd)
    for row in rows:
        assert [one.kind for one in row] == ["DesyncError"] * 3, row
        assert all(one.seconds < LATE_S for one in row)
        assert re.search(r" differs?: .* on rank 1\b", row[0].text), row[0].text
        # All tensors went in one call: two before this one, for each dtype.
        assert f"#{2 * len({dtype for dtype, _ in usual}) + 1}" in row[0].text
        assert [word for word in words if word not in row[0].text] == []
    assert len({row[0].text for row in rows}) == 1


@pytest.mark.parametrize("nodes", ["ab", "aab"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_lists_that_differ_over_nodes(
    own_clusters: Pools, nodes: str, name: str, verb: str
) -> None:
    usual, odd, _ = DIFFERENCES[name]
    rows = own_clusters(nodes).run(disagree, verb, usual, odd)
    for row in rows:
        assert [one.kind for one in row] == ["DesyncError"] * 3, row
        assert all(one.seconds < LATE_S for one in row)
        assert re.search(r"lists differ: .* tensors with sizes #\d+ on rank", row[0].text), row[0]
    assert len({row[0].text for row in rows}) == 1


def separate_calls_there(rank: Rank) -> list[Attempt]:
    """The last rank makes a call of each tensor: the same sums, in the same order."""
    group = rank.comm.new_group(timeout_s=15)
    tensors = [torch.ones(3), torch.ones(40_000)]

    def one_by_one() -> None:
        for tensor in tensors:
            group.all_reduce(tensor)

    is_odd = rank.rank == rank.world_size - 1
    attempts = [attempt(one_by_one if is_odd else lambda: group.all_reduce_coalesced(tensors))]
    attempts.append(attempt(group.barrier))
    group.close()
    return attempts


@pytest.mark.parametrize("nodes", ["ab", "aab"])
def test_a_list_is_not_its_tensors_over_nodes(own_clusters: Pools, nodes: str) -> None:
    last = len(nodes) - 1
    for row in own_clusters(nodes).run(separate_calls_there):
        assert [one.kind for one in row] == ["DesyncError"] * 2, row
        words = rf"lists differ: 2 tensors with sizes #\d+ on .*, no list on rank {last}\."
        assert re.search(words, row[0].text), row[0].text
        assert "numel=3, numerics=same_bits, of 2 tensors with sizes #" in row[0].text


def no_list_there(rank: Rank) -> Attempt:
    group = rank.comm.new_group(timeout_s=15)
    tensor = torch.ones(12)
    call = group.all_reduce if rank.rank else lambda one: group.all_reduce_coalesced([one])
    one = attempt(call, tensor)
    group.close()
    return one


def test_a_list_is_no_tensor(pools: Pools) -> None:
    for one in pools(2).run(no_list_there):
        assert one.kind == "DesyncError"
        assert "lists differ: 1 tensor with sizes #" in one.text
        assert "no list on rank 1" in one.text
        assert "numel=12, 1 tensor with" in one.text


def chunks_in_place(rank: Rank) -> list[bool]:
    """Each input is this rank's chunk of the output, and the other way round."""
    world, me = rank.world_size, rank.rank
    results = []
    for _ in range(2):
        wholes = [torch.zeros(world, numel) for numel in (3, 40_000)]
        for whole in wholes:
            whole[me] = me + 1
        rank.comm.all_gather_into_tensor_coalesced(wholes, [whole[me] for whole in wholes])
        results += [bool((whole[by] == by + 1).all()) for whole in wholes for by in range(world)]
        rank.comm.reduce_scatter_tensor_coalesced([whole[me] for whole in wholes], wholes)
        sums = [world * (me + 1) if by == me else by + 1 for by in range(world)]
        results += [bool((whole[by] == sums[by]).all()) for whole in wholes for by in range(world)]
    return results


@pytest.mark.parametrize("world", [1, 3])
def test_a_ranks_own_chunks_in_place(pools: Pools, world: int) -> None:
    for row in pools(world).run(chunks_in_place):
        assert all(row)
