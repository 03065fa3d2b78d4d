# SPDX-License-Identifier: Apache-2.0
"""Calls that do not match: each field in turn differs on one rank.

Every rank that waits in the call must raise DesyncError soon and show both sides; a rank that did
not wait learns of it in its next call; from then on the group has this one verdict.
"""

import dataclasses

import pytest
import torch

from tests.support.harness import LATE_S, Attempt, Pools, Rank, attempt


@dataclasses.dataclass(frozen=True)
class Request:
    """A call by name, with float32 tensors unless it says otherwise."""

    verb: str = "all_reduce"
    numel: int = 100
    dtype: str = "float32"
    op: str = "SUM"
    algorithm: str = "auto"
    numerics: str = "same_bits"
    root: int = 0


def call(comm: object, request: Request) -> None:
    import fastcoll

    kind = getattr(torch, request.dtype)
    tensor = torch.ones(request.numel, dtype=kind)
    many = torch.ones(request.numel * comm.world_size, dtype=kind)
    op = getattr(fastcoll.ReduceOp, request.op)
    how = {"algorithm": request.algorithm, "numerics": request.numerics}
    if request.verb == "all_reduce":
        fastcoll.all_reduce(tensor, op, comm, **how)
    elif request.verb == "reduce_scatter":
        fastcoll.reduce_scatter_tensor(tensor, many, op, comm, **how)
    elif request.verb == "all_gather":
        fastcoll.all_gather_into_tensor(many, tensor, comm)
    elif request.verb == "broadcast":
        fastcoll.broadcast(tensor, request.root, comm)
    elif request.verb == "reduce":
        fastcoll.reduce(tensor, request.root, op, comm, **how)
    elif request.verb == "gather":
        parts = list(many.chunk(comm.world_size)) if comm.rank == request.root else None
        fastcoll.gather(tensor, parts, request.root, comm)
    elif request.verb == "scatter":
        parts = list(many.chunk(comm.world_size)) if comm.rank == request.root else None
        fastcoll.scatter(tensor, parts, request.root, comm)
    elif request.verb == "all_to_all":
        fastcoll.all_to_all_single(torch.empty_like(many), many, group=comm)
    elif request.verb == "uneven all_gather":
        sizes = [request.numel + rank for rank in range(comm.world_size)]
        parts = [torch.empty(size, dtype=kind) for size in sizes]
        fastcoll.all_gather(parts, torch.ones(sizes[comm.rank], dtype=kind), comm)
    else:
        fastcoll.barrier(comm)


def disagree(rank: Rank, usual: Request, odd: Request, who: int, before: int) -> list[Attempt]:
    """Some matching calls, one that differs on rank `who`, then three barriers."""
    group = rank.comm.new_group(timeout_s=15)
    for _ in range(before):
        call(group, Request(numel=7))
    attempts = [attempt(call, group, odd if rank.rank == who else usual)]
    attempts += [attempt(group.barrier) for _ in range(3)]
    group.close()
    return attempts


def check(
    pools: Pools, world: int, usual: Request, odd: Request, who: int, before: int = 3
) -> None:
    rows = pools(world).run(disagree, usual, odd, who, before)
    verdict = rows[0][-1].text
    for row in rows:
        first = next(one for one in row if one.kind)
        assert row.index(first) <= 1, row  # in the call itself, or in the next one
        for one in row[row.index(first) :]:
            assert one.kind == "DesyncError", one
            assert one.text == verdict
            assert one.seconds < LATE_S
    # Whoever waits for the odd rank hears of it in the call itself.
    if {usual.verb, odd.verb} <= {"all_reduce", "barrier"}:
        assert all(row[0].kind for row in rows)
    assert 'group "world/' in verdict
    assert f"rank {who} called" in verdict


# What the text must show of both sides.
DIFFERENCES = {
    "dtype": (Request(), Request(dtype="int32"), "float32", "int32"),
    "dtype of another size": (Request(), Request(dtype="float64"), "float32", "float64"),
    "numel": (Request(), Request(numel=101), "numel=100", "numel=101"),
    "numel, so another algorithm": (
        Request(),
        Request(numel=1_000_000),
        "numel=100)",
        "numel=1000000",
    ),
    "zero numel": (Request(), Request(numel=0), "numel=100", "numel=0"),
    "op": (Request(), Request(op="MAX"), "SUM", "MAX"),
    "verb, barrier": (Request(), Request("barrier"), "all_reduce", "barrier"),
    "verb, all_gather": (Request(), Request("all_gather"), "all_reduce", "all_gather"),
    "verb, reduce_scatter": (Request(), Request("reduce_scatter"), "all_reduce", "reduce_scatter"),
    "verb, broadcast": (Request(), Request("broadcast"), "all_reduce", "broadcast"),
    "algorithm": (
        Request(algorithm="one_shot"),
        Request(algorithm="two_shot"),
        "one_shot",
        "two_shot",
    ),
    "algorithm, large": (
        Request(numel=300_000, algorithm="two_shot"),
        Request(numel=300_000, algorithm="chain"),
        "two_shot",
        "chain",
    ),
    "numerics": (Request(), Request(numerics="fast"), "numerics=same_bits", "numerics=fast"),
    "numel of a large all_gather": (
        Request("all_gather", 60_000),
        Request("all_gather", 60_001),
        "numel=60000",
        "numel=60001",
    ),
    "verb, all_to_all": (Request(), Request("all_to_all"), "all_reduce", "all_to_all"),
    "verb, reduce": (Request(), Request("reduce"), "all_reduce", "reduce("),
    "numel of an all_to_all": (
        Request("all_to_all"),
        Request("all_to_all", 102),
        "numel=100",
        "numel=102",
    ),
    "dtype of a large all_to_all": (
        Request("all_to_all", 50_000),
        Request("all_to_all", 50_000, "int32"),
        "float32",
        "int32",
    ),
    "sizes of an uneven all_gather": (
        Request("uneven all_gather"),
        Request("uneven all_gather", 99),
        "uneven parts",
        "numel=",
    ),
    "uneven or not": (
        Request("uneven all_gather"),
        Request("all_gather"),
        "uneven parts",
        "numel=100)",
    ),
    "dtype of a large reduce_scatter": (
        Request("reduce_scatter", 50_000),
        Request("reduce_scatter", 50_000, "int32"),
        "float32",
        "int32",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.parametrize(("world", "who"), [(2, 1), (3, 0), (4, 2)])
def test_each_field(pools: Pools, name: str, world: int, who: int) -> None:
    usual, odd, this, that = DIFFERENCES[name]
    check(pools, world, usual, odd, who)
    rows = pools(world).run(disagree, usual, odd, who, 0)
    for row in rows:
        assert this in row[-1].text
        assert that in row[-1].text


# Verbs in which some rank waits for nobody: it learns of it in its next call.
ROOTED = {
    f"{field} of {verb}": (
        Request(verb),
        Request(verb, **other),
        this,
        that,
    )
    for verb, root in (("reduce", "dst"), ("gather", "dst"), ("scatter", "src"))
    for field, other, this, that in (
        ("root", {"root": 1}, f"{root}=0", f"{root}=1"),
        ("numel", {"numel": 99}, "numel=100", "numel=99"),
        ("dtype", {"dtype": "int32"}, "float32", "int32"),
        ("size", {"numel": 90_000}, "numel=100", "numel=90000"),
    )
}
BROADCASTS = ROOTED | {
    "root": (Request("broadcast", root=0), Request("broadcast", root=1), "src=0", "src=1"),
    "numel": (Request("broadcast"), Request("broadcast", 99), "numel=100", "numel=99"),
    "large": (Request("broadcast", 90_000), Request("broadcast", 90_001), "90000", "90001"),
    "dtype": (Request("broadcast"), Request("broadcast", dtype="int32"), "float32", "int32"),
}


@pytest.mark.parametrize("name", BROADCASTS)
@pytest.mark.parametrize(("world", "who"), [(2, 0), (2, 1), (3, 1), (3, 2)])
def test_verbs_with_a_root(pools: Pools, name: str, world: int, who: int) -> None:
    usual, odd, this, that = BROADCASTS[name]
    rows = pools(world).run(disagree, usual, odd, who, 2)
    for row in rows:
        assert "DesyncError" in (row[0].kind, row[1].kind), row
        assert row[2].kind == row[3].kind == "DesyncError"
        assert this in row[3].text
        assert that in row[3].text
        assert all(one.seconds < LATE_S for one in row)
    assert len({row[3].text for row in rows}) == 1


def missed_call(rank: Rank) -> list[Attempt]:
    """One rank makes a call less; the next calls look alike but their predecessors differ."""
    group = rank.comm.new_group(timeout_s=15)
    attempts = []
    if rank.rank:
        attempts.append(attempt(group.broadcast, torch.ones(3), rank.rank))
    attempts += [attempt(group.all_reduce, torch.ones(5)) for _ in range(3)]
    group.close()
    return attempts


def test_a_rank_that_missed_a_call(pools: Pools) -> None:
    """Ranks 1 and 2 broadcast to each other first: nobody waits there, the next call tells."""
    for row in pools(3).run(missed_call):
        assert row[-1].kind == "DesyncError"
        assert "broadcast" in row[-1].text
        assert all(one.seconds < LATE_S for one in row)


def after_another_root(rank: Rank, gap: int) -> list[Attempt]:
    """Different roots, some calls in which nobody waits for the odd rank, then one that does."""
    group = rank.comm.new_group(timeout_s=15)
    attempts = [attempt(group.broadcast, torch.ones(3), 0 if rank.rank == 0 else 1)]
    for _ in range(gap):
        attempts.append(attempt(group.broadcast, torch.ones(3), rank.rank))
    attempts.append(attempt(group.barrier))
    group.close()
    return attempts


@pytest.mark.parametrize("gap", [0, 1, 2])
def test_a_difference_that_nobody_waited_on(pools: Pools, gap: int) -> None:
    for row in pools(2).run(after_another_root, gap):
        assert row[-1].kind == "DesyncError", row
        assert "src=0" in row[-1].text
        assert "src=1" in row[-1].text
        assert row[-1].seconds < LATE_S


def others_go_on(rank: Rank) -> list[float]:
    """A desync in one group says nothing about another one."""
    broken = rank.comm.new_group()
    good = rank.comm.new_group()
    first = attempt(broken.all_reduce, torch.ones(3 + rank.rank))
    assert first.kind == "DesyncError", first
    values = []
    for comm in (good, rank.comm):
        tensor = torch.ones(2)
        comm.all_reduce(tensor)
        values.append(tensor[1].item())
    broken.close()
    good.close()
    return values


def test_other_groups_go_on(pools: Pools) -> None:
    assert pools(2).run(others_go_on) == [[2.0, 2.0]] * 2


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
        assert "numel=3" in row[2].text
        assert "numel=4" in row[2].text


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
