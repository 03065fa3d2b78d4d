# SPDX-License-Identifier: Apache-2.0
"""Calls that differ between ranks are an error on all of them, soon, at every site.

Each field of a call in turn is another one on some ranks: one rank of a node, or a whole node.
Every rank that waits in the call raises DesyncError and shows both sides; a rank that does not
wait learns of it in its next call. From then on the group has this one verdict. The GPU made of the
CPU is no such site: it has no kernels that could compare calls.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.calls import REDUCTIONS, ROOTED, Call
from tests.support.draw import VERBS
from tests.support.harness import LATE_S, Attempt, Pool, Pools, Setup, attempt
from tests.support.sites import Site, in_new_group, without_gpu

BARRIER = Call("barrier", "uint8", 0)
Case = tuple[Call, Call, tuple[str, str]]  # the usual call, the odd one, words of the error


def differences(site: Site, verb: str, numel: int) -> Iterator[Case]:
    """Each field of a call, and another value of it."""
    numerics = site.limits.numerics if verb in REDUCTIONS else None
    usual = Call(verb, "float32", numel, numerics=numerics)
    yield usual, replace(usual, dtype="int32"), ("float32", "int32")
    yield usual, replace(usual, dtype="float64"), ("float32", "float64")
    for other in (0, numel + 2, 1_000_000 if numel < 1000 else 10):
        yield usual, replace(usual, numel=other), ("numel=", "numel=")
    other_verb = VERBS[(VERBS.index(verb) + 1) % len(VERBS)]
    yield usual, replace(usual, verb=other_verb, numerics=None), (verb, other_verb)
    yield usual, BARRIER, (verb, "barrier")
    if verb in ROOTED:
        yield usual, replace(usual, root=1), ("=0", "=1")
    if verb in REDUCTIONS:
        yield usual, replace(usual, op="MAX"), ("SUM", "MAX")
        if site.in_new_group is in_new_group:
            same, fast = replace(usual, numerics="same_bits"), replace(usual, numerics="fast")
            yield same, fast, ("numerics=same_bits", "numerics=fast")
        if "two_shot" in site.limits.algorithms:
            one, two = replace(usual, algorithm="one_shot"), replace(usual, algorithm="two_shot")
            yield one, two, ("one_shot", "two_shot")
            if verb != "reduce":
                yield two, replace(usual, algorithm="chain"), ("two_shot", "chain")


def make_plain(comm: Any, make: Callable[..., Any], barrier: Callable[[], Any], call: Call) -> None:
    """Make a call with ones."""
    if call == BARRIER:
        barrier()
        return
    num_in, num_out = call.numels(comm.world_size)
    ins = torch.ones(num_in, dtype=getattr(torch, call.dtype))
    in_place = call.verb in ("all_reduce", "reduce", "broadcast")
    make(comm, call, ins, ins if in_place else ins.new_ones(num_out), False)


def disagree(
    comm: Any,
    make: Callable[..., Any],
    barrier: Callable[[], Any],
    case: Case,
    odd_ranks: list[int],
    before: int,
) -> list[Attempt]:
    """Make some matching calls, one that differs on some ranks, then three barriers."""
    for _ in range(before):
        make_plain(comm, make, barrier, Call("all_reduce", "float32", 7))
    call = case[1] if comm.rank in odd_ranks else case[0]
    found = [attempt(make_plain, comm, make, barrier, call)]
    return found + [attempt(barrier) for _ in range(3)]


def check(case: Case, odd_ranks: list[int], rows: list[list[Attempt]]) -> None:
    """Every rank has the one error, by its next call."""
    usual, odd, words = case
    verdict = rows[0][-1].text
    for row in rows:
        assert row[0].kind or row[1].kind, (case, row)
        for one in row[0 if row[0].kind else 1 :]:
            assert one.kind == "DesyncError", (case, one)
            assert one.text == verdict, (case, one)
            assert one.seconds < LATE_S, (case, one)
    if usual.verb == "all_reduce" and odd.verb in ("all_reduce", "barrier"):  # where all wait
        assert all(row[0].kind for row in rows), (case, rows)
    assert re.search(rf"ranks? \[?{odd_ranks[0]}\b", verdict), (case, verdict)
    assert all(word in verdict for word in words), (case, verdict)


def check_each_field(site: Site, verb: str, numel: int) -> None:
    """Let ranks of a site call with each other value of each field of a call."""
    assert site.pool is not None
    for before, case in enumerate(differences(site, verb, numel)):
        for odd_ranks in odd_ranks_of(site):
            rows = site.pool.run(site.in_new_group, disagree, case, odd_ranks, before % 3)
            check(case, odd_ranks, rows)


@pytest.fixture(scope="module")
def own_clusters() -> Iterator[Pools]:
    """Ranks on nodes for this file alone, as groups that broke are left behind in them."""
    with closing(Pools(lambda nodes: Pool(len(nodes), Setup(nodes=nodes)))) as result:
        yield result


def odd_ranks_of(site: Site) -> list[list[int]]:
    """The last node; on one node a rank in the middle, and the first."""
    if site.nodes:
        return [[rank for rank, node in enumerate(site.nodes) if node == site.nodes[-1]]]
    return [[site.world // 2], [0]]


@pytest.mark.parametrize("numel", [100, 50_000])
@pytest.mark.parametrize("verb", VERBS)
@without_gpu
def test_each_field(site: Site, own_clusters: Pools, verb: str, numel: int) -> None:
    if site.world == 1:
        pytest.skip("one rank differs from nobody")
    pool = own_clusters(site.nodes) if site.nodes else site.pool
    assert pool is not None
    check_each_field(site.on(pool), verb, numel)


def test_a_difference_without_an_error_on_all_is_seen() -> None:
    """Negative control of the check: silence, another text, a late error, another rank's name."""
    case = (Call("all_reduce", "float32", 8), Call("all_reduce", "float32", 9), ("=8", "=9"))
    told = Attempt("DesyncError", "rank 1 called numel=9, the others numel=8", 0.1)
    check(case, [1], [[told, told]] * 3)
    for wrong in (
        Attempt("", "", 0),
        Attempt("RuntimeError", told.text, 0.1),
        Attempt("DesyncError", "rank 1 called numel=9", 0.1),
        Attempt("DesyncError", told.text, 30),
    ):
        with pytest.raises(AssertionError):
            check(case, [1], [[told, told], [told, wrong], [told, told]])
    with pytest.raises(AssertionError):
        check(case, [0], [[told, told]] * 3)
