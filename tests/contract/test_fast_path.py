# SPDX-License-Identifier: Apache-2.0
"""Which calls need no Python: the second plain call of its kind; and which must not do without.

Decides nothing about results beyond what tells the calls apart: the other tests compare them, on
either way.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fastcoll
from fastcoll import _C
from fastcoll.api import VERBS
from tests.support.fallbacks import Passed, noting, refusing
from tests.support.harness import Pools, Rank
from tests.support.verb_calls import VERB_CALLS, VerbCall, root, verbs_of

TRANSFERS = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
WITHOUT_A_PLAN = ("barrier", "all_to_all", *TRANSFERS)  # or with one that knows no size


def calls_of(verb: str) -> Iterator[tuple[str, VerbCall]]:
    """The calls of a verb; of uneven parts and of a rank's own part, too."""
    yield from ((name, call) for name, call in VERB_CALLS.items() if verb in verbs_of(name))
    if verb == "all_to_all_single":
        yield "counted", VerbCall(counted, "io")
    if verb == "gather_single":
        yield "its own part", VerbCall(gather_own_part, "o", writes=root)


def counted(comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    splits = [len(got) // comm.world_size] * comm.world_size
    comm.all_to_all_single(got, given, splits, splits)


def gather_own_part(comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    own = got[: len(given)].copy_(given) if comm.rank == 0 else given
    comm.gather_single(own, got, 0)


def without_python(rank: Rank, verb: str, numel: int, seal: bool) -> list[str]:
    """Each call twice, the second time with nothing to pass it on to; both must give the same.

    Sealed, the first one has nothing either; in a group of its own, as other tests make calls too.
    """
    comm = rank.comm.new_group() if seal else rank.comm
    problems = []
    for name, call in calls_of(verb):
        given, start = call.tensors(rank.world_size, numel=numel)
        given += rank.rank
        results = [start.clone(), start.clone()]
        for turn, got in enumerate(results):
            try:
                with refusing(verb) if turn or seal else noting(verb):
                    call.make(comm, given, got)
            except Passed:
                problems.append(f"{name} was passed on")
        if not (seal or torch.equal(*results)):
            problems.append(f"{name} gave something else")
        if (
            not seal
            and rank.world_size > 1
            and torch.equal(results[-1], start) == call.writes(rank.rank)
        ):
            problems.append(f"{name} wrote nothing, or what it must not write")
    if seal:
        comm.close()
    return problems


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_the_second_call_needs_no_python(pools: Pools, verb: str, world: int) -> None:
    for numel in (5, 30_000):
        assert pools(world).run(without_python, verb, numel, False) == [[]] * world


def test_the_first_call_does(pools: Pools) -> None:
    """The means by which this file tells: calls of a size that nobody made before."""
    for number, verb in enumerate(VERBS):
        if verb not in WITHOUT_A_PLAN:
            [first, *_], *_ = pools(2).run(without_python, verb, 1_111 + number, True)
            assert first.endswith("was passed on")


def many_sizes(rank: Rank) -> list[int]:
    """Sizes of which not every later call finds its plan, among hundreds that take turns."""
    values = torch.ones(800)
    for numel in range(801):
        rank.comm.all_reduce(values[:numel], fastcoll.ReduceOp.MAX)
    with noting("all_reduce") as passed:
        for _ in range(2):
            for numel in range(801):
                rank.comm.all_reduce(values[:numel], fastcoll.ReduceOp.MAX)
    assert bool((values == 1).all())
    return [tensor.numel() for _, tensor in passed]


def test_sizes_do_not_drive_each_other_out(pools: Pools) -> None:
    assert pools(2).run(many_sizes) == [[], []]


def new_sizes(rank: Rank, verb: str) -> list[Any]:
    """Sizes that nobody had before, beside one that somebody had; the next ones, and asked ones."""
    comm, function = rank.comm.new_group(), getattr(fastcoll, verb)

    def call(numel: int, **options: Any) -> bool:
        values = torch.arange(float(numel)) + rank.rank
        wants = values * 2 + 1 - 2 * rank.rank if verb == "all_reduce" else values - rank.rank
        function(values, *(() if verb == "all_reduce" else (0,)), group=comm, **options)
        return torch.equal(values, wants)

    right = [call(100_000)]  # planned alike: 98,305 to 114,688
    with noting(verb) as passed:
        right += [call(numel) for numel in (98_305, 98_306, 111_111, 114_688)]
        alike = len(passed)
        right += [call(numel) for numel in (98_304, 114_689)]
        asked = len(passed) - alike
        if verb == "all_reduce":
            right += [call(100_000 + i, algorithm="two_shot") for i in (0, 1, 0, 1)]
    comm.close()
    return [all(right), alike, asked, len(passed) - alike - asked]


@pytest.mark.parametrize(("verb", "asks"), [("all_reduce", 1), ("broadcast", 0)])
def test_sizes_near_known_ones_need_no_python(pools: Pools, verb: str, asks: int) -> None:
    assert pools(2).run(new_sizes, verb) == [[True, 0, 2, asks]] * 2


def new_cuts(rank: Rank) -> list[Any]:
    """Lists and uneven parts of sizes that nobody had before, of about as much as somebody had."""
    comm, me = rank.comm.new_group(), rank.rank
    verbs = ("all_gather", "all_reduce_coalesced", "all_gather_into_tensor_coalesced")

    def call(first: int, second: int) -> bool:
        parts = [torch.empty(first), torch.empty(second)]
        comm.all_gather(parts, torch.full((parts[me].numel(),), me + 1.0))
        right = [bool((part == by + 1).all()) for by, part in enumerate(parts)]
        sums = [torch.full((first,), me + 1.0), torch.full((second,), me + 2.0)]
        comm.all_reduce_coalesced(sums)
        right += [bool((one == want).all()) for one, want in zip(sums, (3, 5), strict=True)]
        wholes = [torch.empty(2, first), torch.empty(2, second)]
        mine = [torch.full((first,), me + 3.0), torch.full((second,), me + 4.0)]
        comm.all_gather_into_tensor_coalesced(wholes, mine)
        return all(
            bool((whole[by] == add + by).all())
            for whole, add in zip(wholes, (3, 4), strict=True)
            for by in range(2)
        ) and all(right)

    right = [call(50_000, 40_000)]
    with noting(*verbs) as passed:
        right += [call(50_001, 39_999), call(1, 88_000), call(0, 89_000), call(41_000, 41_500)]
        known = len(passed)
        right.append(call(60_000, 40_000))
    comm.close()
    return [all(right), known, sorted(verb for verb, _ in passed)]


def test_cuts_that_are_new_need_no_python(pools: Pools) -> None:
    verbs = ["all_gather", "all_gather_into_tensor_coalesced", "all_reduce_coalesced"]
    assert pools(2).run(new_cuts) == [[True, 0, verbs]] * 2


def by_two_ways(rank: Rank) -> list[bool]:
    """Rank 0's plans are Python's, the others' are C++'s, which has met neighbours only.

    Ranks that had other plans would find out: they are part of the calls' stamps.
    """
    comm, me, world = rank.comm.new_group(), rank.rank, rank.world_size
    numels = np.unique(np.geomspace(1, 1_500_000, 200).astype(int)).tolist()
    verbs = ("all_reduce", "all_gather_into_tensor", "all_gather", "all_reduce_coalesced")
    right = []
    for numel in [*numels[::3], *numels]:
        by_python = me == 0 or numel in numels[::3]
        reduce, gather, gather_parts, reduce_list = (
            VERBS[verb] if by_python else getattr(fastcoll, verb) for verb in verbs
        )
        values, whole = torch.full((numel,), me + 1.0), torch.zeros(world, numel)
        gather(whole, values, group=comm)
        reduce(values, group=comm)
        right.append(bool((values == world * (world + 1) / 2).all()))
        right.append(bool((whole == torch.arange(1.0, world + 1)[:, None]).all()))
        parts = [torch.zeros(numel + by) for by in range(world)]
        gather_parts(parts, torch.full((numel + me,), me + 1.0), comm)
        reduce_list(parts, group=comm)
        right += [bool((part == world * (by + 1)).all()) for by, part in enumerate(parts)]
    comm.close()
    return right


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_python_and_cpp_plan_alike(pools: Pools, world: int) -> None:
    for row in pools(world).run(by_two_ways):
        assert all(row)


def test_every_verb_is_here() -> None:
    fast = {
        name
        for name in dir(_C)
        if type(getattr(_C, name)).__name__ == "builtin_function_or_method"
        and getattr(_C, name).__module__ == "fastcoll"
    }
    assert fast == set(VERBS)
