# SPDX-License-Identifier: Apache-2.0
"""Calls that differ between ranks are an error on all of them, soon, at every site.

Each field of a call in turn is another one on some ranks: one rank of a node, or a whole node.
Then the sizes of parts are others.
Every rank that waits in the call raises DesyncError and shows both sides. A rank that does not
wait learns of it in its next call. From then on the group has this one verdict. The GPU made of the
CPU is no such site: it has no kernels that could compare calls.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch

from tests.proofs import LIBRARY
from tests.support.calls import BARRIER, REDUCTIONS, ROOTED, Call
from tests.support.draw import VERBS
from tests.support.harness import LATE_S, OVER, Attempt, Pools, Rank, attempt
from tests.support.perform import make_plain
from tests.support.sites import Site, in_new_group, without_gpu

Case = tuple[Call, Call, tuple[str, str]]  # the usual call, the odd one, words of the error


def differences(site: Site, verb: str, numel: int) -> Iterator[Case]:
    """Each field of a call, and another value of it."""
    numerics = site.limits.numerics if verb in REDUCTIONS else None
    usual = Call(verb, "float32", numel, numerics=numerics)
    yield usual, replace(usual, dtype="int32"), ("dtype differs: ", "float32 on", "int32 on")
    yield usual, replace(usual, dtype="float64"), ("dtype differs: ", "float32 on", "float64 on")
    for other in (0, numel + 2, 1_000_000 if numel < 1000 else 10):
        yield usual, replace(usual, numel=other), ("numel differs: ", f"{other} on rank")
    other_verb = VERBS[(VERBS.index(verb) + 1) % len(VERBS)]
    yield usual, replace(usual, verb=other_verb, numerics=None), (verb, other_verb)
    yield usual, BARRIER, ("verb differs: ", verb, "barrier()")
    if verb in ROOTED:
        yield usual, replace(usual, root=1), (" differs: ", " 0 on rank", " 1 on rank")
    if verb in REDUCTIONS:
        yield usual, replace(usual, op="MAX"), ("op differs: ", "SUM on", "MAX on")
        if site.in_new_group is in_new_group:
            same, fast = replace(usual, numerics="same_bits"), replace(usual, numerics="fast")
            yield same, fast, ("numerics differ", "same_bits on rank", "fast on rank")
        if "two_shot" in site.limits.algorithms:
            one, two = replace(usual, algorithm="one_shot"), replace(usual, algorithm="two_shot")
            yield one, two, ("algorithm differs: ", "one_shot on", "two_shot on")
            if verb != "reduce":
                yield two, replace(usual, algorithm="chain"), ("two_shot", "chain")


def disagree(comm: Any, case: Case, odd_ranks: list[int], before: int) -> list[Attempt]:
    """Make some matching calls, one that differs on some ranks, then three barriers."""
    for _ in range(before):
        make_plain(comm, Call("all_reduce", "float32", 7))
    call = case[1] if comm.rank in odd_ranks else case[0]
    found = [attempt(make_plain, comm, call)]
    return found + [attempt(comm.barrier) for _ in range(3)]


def check(case: Case, odd_ranks: list[int], rows: list[list[Attempt]]) -> None:
    """Every rank has the one error, by its next call."""
    usual, odd, words = case
    check_verdict(words, odd_ranks, rows)
    if usual.verb == "all_reduce" and odd.verb in ("all_reduce", "barrier"):  # where all wait
        assert all(row[0].kind for row in rows), (case, rows)


def check_verdict(words: Iterable[str], odd_ranks: list[int], rows: list[list[Attempt]]) -> None:
    """Every rank has the one error, by its next call; it names an odd rank and has all words."""
    verdict = rows[0][-1].text
    for row in rows:
        assert row[0].kind or row[1].kind, row
        for one in row[0 if row[0].kind else 1 :]:
            assert one.kind == "DesyncError", one
            assert one.text == verdict, one
            assert one.seconds < LATE_S, one
    assert re.search(rf"ranks? \[?{odd_ranks[0]}\b", verdict), verdict
    assert all(word in verdict for word in words), (words, verdict)
    assert "(rank " not in verdict, "every rank raises the text, none may take it for its own"
    if " gives " not in verdict:  # a text about counts shows those alone
        is_shown = verdict.count("called") == 1
        assert is_shown or "verb differs" in verdict, "the call that is the same is shown once"
    assert verdict.endswith(OVER)


def check_each_field(site: Site, verb: str, numel: int, every: bool = True) -> None:
    """Let ranks of a site call with each other value of each field of a call.

    Unless every field is wanted, two verbs share the fields of a size, and two sizes those of a
    verb.
    """
    assert site.pool is not None
    first = VERBS.index(verb) + (numel > 1000)
    for before, case in enumerate(differences(site, verb, numel)):
        if not every and (first + before) % 2:
            continue
        for odd_ranks in odd_ranks_of(site, before):
            rows = site.pool.run(site.in_new_group, disagree, case, odd_ranks, before % 3)
            check(case, odd_ranks, rows)


def odd_ranks_of(site: Site, turn: int) -> list[list[int]]:
    """The last node and its last rank by turns; on one node a rank in the middle, and the first."""
    if site.nodes:
        last = [rank for rank, node in enumerate(site.nodes) if node == site.nodes[-1]]
        return [last[-1:] if turn % 2 else last]
    return [[site.world // 2], [0]]


def among_others(site: Site, own_clusters: Pools) -> Site:
    """Return the site with ranks that may keep broken groups."""
    if site.world == 1:
        pytest.skip("one rank differs from nobody")
    return site.on(own_clusters(site.nodes)) if site.nodes else site


@pytest.mark.parametrize(
    "numel",
    [100, pytest.param(50_000, marks=[pytest.mark.long, pytest.mark.proof(*LIBRARY)])],
)
@pytest.mark.parametrize("verb", VERBS)
@without_gpu
def test_each_field(
    request: pytest.FixtureRequest, site: Site, own_clusters: Pools, verb: str, numel: int
) -> None:
    every = request.node.get_closest_marker("slow") is None  # those of another number of ranks
    check_each_field(among_others(site, own_clusters), verb, numel, every)


# ---- parts and split sizes, which no field of a call tells ---------------------------------------

# Of a group, a number of elements, and whether this rank is odd.
Form: TypeAlias = Callable[[Any, int, bool], None]


def parts_of(comm: Any, numel: int, is_odd: bool) -> list[torch.Tensor]:
    """Uneven parts; odd ones move an element from the last to the first, so the sum is the same."""
    sizes = [numel + rank for rank in range(comm.world_size)]
    sizes[0] += is_odd
    sizes[-1] -= is_odd
    return [torch.ones(size) for size in sizes]


def all_gather_of_other_parts(comm: Any, numel: int, is_odd: bool) -> None:
    parts = parts_of(comm, numel, is_odd)
    comm.all_gather(parts, parts[comm.rank].clone())


def all_gather_of_equal_parts(comm: Any, numel: int, is_odd: bool) -> None:
    if is_odd:
        comm.all_gather_into_tensor(torch.ones(numel * comm.world_size), torch.ones(numel))
    else:
        all_gather_of_other_parts(comm, numel, False)


def reduce_scatter_of_other_parts(comm: Any, numel: int, is_odd: bool) -> None:
    parts = parts_of(comm, numel, is_odd)
    comm.reduce_scatter(parts[comm.rank].clone(), parts)


def all_to_all_of_split_sizes(comm: Any, numel: int, is_odd: bool) -> None:
    sizes = [numel] * comm.world_size if is_odd else None
    source = torch.ones(numel * comm.world_size)
    comm.all_to_all_single(torch.empty_like(source), source, sizes, sizes)


def all_to_all_of_other_counts(comm: Any, numel: int, is_odd: bool) -> None:
    """An odd rank gives the next one an element more than that expects."""
    gives, gets = [numel] * comm.world_size, [numel] * comm.world_size
    gives[(comm.rank + 1) % comm.world_size] += is_odd
    comm.all_to_all_single(torch.empty(sum(gets)), torch.ones(sum(gives)), gets, gives)


FORMS: dict[Form, tuple[str, ...]] = {
    all_gather_of_other_parts: ("parts",),
    all_gather_of_equal_parts: ("parts", "equal on rank"),
    reduce_scatter_of_other_parts: ("reduce", "differs: "),  # it is one reduce for each part
    all_to_all_of_other_counts: (" gives ", " elements to rank", "which expects ", "do not match"),
    all_to_all_of_split_sizes: ("parts", "equal on rank"),
}


def differ_in_form(comm: Any, form: Form, numel: int, odd_ranks: list[int]) -> list[Attempt]:
    """Make a call whose parts are others on some ranks, then three barriers."""
    found = [attempt(form, comm, numel, comm.rank in odd_ranks)]
    return found + [attempt(comm.barrier) for _ in range(3)]


def check_each_form(site: Site, numel: int) -> None:
    """Let ranks of a site call with other parts or split sizes."""
    assert site.pool is not None
    for turn, (form, words) in enumerate(FORMS.items()):
        for odd_ranks in odd_ranks_of(site, turn):
            rows = site.pool.run(site.in_new_group, differ_in_form, form, numel, odd_ranks)
            check_verdict(words, odd_ranks, rows)


@pytest.mark.parametrize("numel", [100, 50_000])
@without_gpu
def test_parts_and_split_sizes(site: Site, own_clusters: Pools, numel: int) -> None:
    check_each_form(among_others(site, own_clusters), numel)


# ---- what one rank calls otherwise, or later -----------------------------------------------------


def asynchronous(rank: Rank) -> list[Attempt]:
    group = rank.comm.new_group(timeout_s=15)
    works = [
        group.all_reduce(torch.ones(3 + (rank.rank == 1) * (number == 2)), async_op=True)
        for number in range(5)
    ]
    attempts = [attempt(work.wait) for work in works]
    group.close()
    return attempts


def test_asynchronous_calls(pools: Pools) -> None:
    for row in pools(3).run(asynchronous):
        assert [one.kind for one in row] == ["", "", *["DesyncError"] * 3]
        assert "numel differs: " in row[2].text
        assert " 3 on rank " in row[2].text
        assert " 4 on rank 1" in row[2].text


def local_differences(rank: Rank) -> list[Attempt]:
    """Shape, strides, place, in or out of place, limits and threads may differ."""
    comm, odd = rank.comm, rank.rank == 1
    out = torch.empty(4, 6)
    attempts = [
        attempt(comm.all_reduce, torch.ones(24) if odd else torch.ones(4, 6)),
        attempt(comm.all_reduce, torch.ones(4, 6), out=out if odd else None),
        attempt(comm.all_reduce, torch.ones(6, 4).t() if odd else torch.ones(4, 6)),
        attempt(comm.all_reduce, torch.ones(24), timeout_s=9.0 if odd else 10.0),
    ]
    work = comm.all_reduce(torch.ones(24), async_op=True) if odd else None
    attempts.append(attempt(work.wait) if work else attempt(comm.all_reduce, torch.ones(24)))
    return attempts


def test_what_is_a_ranks_own_business(pools: Pools) -> None:
    for row in pools(2).run(local_differences):
        assert [one.kind for one in row] == [""] * 5


def test_a_difference_without_an_error_on_all_is_seen() -> None:
    """Negative control of the check: silence, another text, a late error, another rank's name."""
    case = (Call("all_reduce", "float32", 8), Call("all_reduce", "float32", 9), (" 8 on", " 9 on"))
    text = "numel differs: 8 on rank 0, 9 on rank 1. Rank 0 called it" + OVER
    told = Attempt("DesyncError", text, 0.1)
    check(case, [1], [[told, told]] * 3)
    for wrong in (
        Attempt("", "", 0),
        Attempt("RuntimeError", told.text, 0.1),
        Attempt("DesyncError", text.replace("8 on", "7 on"), 0.1),
        Attempt("DesyncError", told.text, 30),
    ):
        with pytest.raises(AssertionError):
            check(case, [1], [[told, told], [told, wrong], [told, told]])
    for everywhere in (f"all_reduce (rank 1 of 2): {text}", f"{text}; rank 1 called it"):
        one = Attempt("DesyncError", everywhere, 0.1)
        with pytest.raises(AssertionError):
            check(case, [1], [[one, one]] * 3)
    with pytest.raises(AssertionError):
        check(case, [2], [[told, told]] * 3)
