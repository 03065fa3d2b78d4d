# SPDX-License-Identifier: Apache-2.0
"""Parts of any size: split sizes, lists, uneven all_gather and reduce_scatter.

Decides the sizes; every element says which rank gave it to whom, so a part in a wrong place shows.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastcoll
from tests.support.harness import Pools, Rank
from tests.support.sites import Site, in_torch, without_gpu

WORLD = 3
LARGE = 70_001  # elements of 4 bytes: several segments, and no whole number of them


def given_to(giver: int, getter: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The part that a rank gives to another one: its elements tell which one it is."""
    return (torch.arange(numel) * 7 + giver * 3 + getter * 5).to(dtype)


@dataclasses.dataclass(frozen=True)
class Shuffle:
    """An all_to_all: rank i gives `rows[i][j]` rows of `width` elements to rank j."""

    rows: tuple[tuple[int, ...], ...]
    width: int
    dtype: str
    form: str  # "single", "list", "no output" or "strided"


@st.composite
def shuffles(draw: st.DrawFn) -> Shuffle:
    sizes = st.one_of(st.just(0), st.integers(0, 40), st.just(LARGE))
    row = st.tuples(*[sizes] * WORLD)
    form = draw(st.sampled_from(["single", "list", "no output", "strided"]))
    dtype = draw(st.sampled_from(["float32", "uint8", "int64", "bfloat16"]))
    return Shuffle(draw(st.tuples(*[row] * WORLD)), draw(st.sampled_from([1, 1, 3])), dtype, form)


def shuffle(rank: Rank, case: Shuffle) -> list[bool]:
    """Whether what came from each rank is what it gave."""
    me, world = rank.rank, rank.world_size
    dtype = getattr(torch, case.dtype)
    ins = [given_to(me, to, case.rows[me][to] * case.width, dtype) for to in range(world)]
    wants = [given_to(by, me, case.rows[by][me] * case.width, dtype) for by in range(world)]
    splits = [row[me] for row in case.rows]
    if case.form == "list":
        outs = [torch.empty_like(want) for want in wants]
        fastcoll.all_to_all(outs, ins, rank.comm)
        return [torch.equal(out, want) for out, want in zip(outs, wants, strict=True)]
    given = torch.cat(ins).view(-1, case.width)
    before = given.clone()
    if case.form == "no output":
        out, got = fastcoll.all_to_all_single(None, given, None, case.rows[me], rank.comm)
        assert got == splits
    else:
        out = torch.empty(sum(splits), case.width, dtype=dtype)
        if case.form == "strided":
            given, out = given.t().contiguous().t(), torch.stack([out, out], 1)[:, 0]
        fastcoll.all_to_all_single(out, given, splits, case.rows[me], rank.comm)
    parts = out.split(splits)
    right = [torch.equal(p.reshape(-1), want) for p, want in zip(parts, wants, strict=True)]
    return [*right, torch.equal(given, before)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=shuffles())
def test_all_to_all_of_any_sizes(pools: Pools, case: Shuffle) -> None:
    for row in pools(WORLD).run(shuffle, case):
        assert all(row), case


@pytest.mark.parametrize("world", [1, 2, 4, 5])
def test_all_to_all_in_other_worlds(pools: Pools, world: int) -> None:
    for form in ("single", "list", "no output", "strided"):
        rows = tuple(tuple((i * 5 + j * 3) % 7 * 1000 for j in range(world)) for i in range(world))
        for row in pools(world).run(shuffle, Shuffle(rows, 2, "float32", form)):
            assert all(row)


def counted(comm: Any, size: int, base: int, *, as_list: bool, async_op: bool) -> tuple[Any, Any]:
    """Start an all_to_all of parts of unequal size; return its Work and a check of its result."""
    me, world = comm.rank, comm.world_size
    sizes = [[size * ((src + 2 * dst) % 3) for dst in range(world)] for src in range(world)]
    given = [torch.full((count,), base + 10.0 * me + dst) for dst, count in enumerate(sizes[me])]
    got = [torch.zeros(row[me]) for row in sizes]
    if as_list:
        work = comm.all_to_all(got, given, async_op=async_op)
    else:
        whole, splits = torch.zeros(sum(row[me] for row in sizes)), [row[me] for row in sizes]
        work = comm.all_to_all_single(whole, torch.cat(given), splits, sizes[me], async_op=async_op)
        got = list(whole.split(splits))
    return work, lambda: all((one == base + 10.0 * src + me).all() for src, one in enumerate(got))


def counted_in_the_queue(rank: Rank, as_list: bool) -> None:
    comm = rank.comm
    for size in (0, 1, 30_000):
        started = [
            counted(comm, size, base, as_list=as_list, async_op=base < 200)
            for base in (0, 100, 200)  # the last one waits behind those before it
        ]
        for work, is_right in started:
            assert work is None or work.wait()
            assert is_right()


@without_gpu
@pytest.mark.parametrize("as_list", [False, True], ids=["split sizes", "lists"])
def test_parts_that_are_counted(site: Site, as_list: bool) -> None:
    """Their sizes are told within the call: behind it they would wait for it for ever."""
    site.run(counted_in_the_queue, as_list)


def symmetric_shuffle(rank: Rank, numel: int) -> list[bool]:
    """From symmetric memory on the even ranks, of equal and of counted parts."""
    me, world, results = rank.rank, rank.world_size, []
    symmetric = rank.comm.empty(world * numel)
    private = torch.empty(world * numel)
    for splits in (None, [numel] * world):
        given = private if me % 2 else symmetric
        given.copy_(torch.cat([given_to(me, to, numel, torch.float32) for to in range(world)]))
        out = torch.empty_like(private)
        fastcoll.all_to_all_single(out, given, splits, splits, rank.comm)
        given.fill_(-1)  # it is ours again
        want = torch.cat([given_to(by, me, numel, torch.float32) for by in range(world)])
        results.append(torch.equal(out, want))
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_all_to_all_from_symmetric_memory(pools: Pools, world: int) -> None:
    for _ in range(5):
        assert pools(world).run(symmetric_shuffle, 50_000) == [[True, True]] * world


def uneven(rank: Rank, sizes: list[int], numpy: bool) -> list[bool]:
    """all_gather and reduce_scatter of lists, sync and async; whether all is right."""
    me, world, comm, results = rank.rank, rank.world_size, rank.comm, []
    for async_op in (False, True):
        mine = given_to(me, 0, sizes[me], torch.float32)
        outs = [torch.full((size,), -1.0) for size in sizes]
        arrays: list[Any] = [out.numpy() for out in outs] if numpy else outs
        if work := comm.all_gather(arrays, mine, async_op=async_op):
            work.wait()
        results += [
            torch.equal(out, given_to(by, 0, size, torch.float32))
            for by, (out, size) in enumerate(zip(outs, sizes, strict=True))
        ]
        ins = [given_to(me, to, size, torch.float32) for to, size in enumerate(sizes)]
        out = torch.empty(sizes[me])
        if work := comm.reduce_scatter(out, ins, async_op=async_op):
            work.wait()
        wants = [given_to(by, me, sizes[me], torch.float32) for by in range(world)]
        results.append(torch.equal(out, torch.stack(wants).sum(0)))
        before = [given_to(me, to, size, torch.float32) for to, size in enumerate(sizes)]
        results += [torch.equal(*pair) for pair in zip(ins, before, strict=True)]
    return results


def check_uneven(site: Site, size: int) -> None:
    """Lists of even and of uneven parts, of tensors and of arrays."""
    for sizes in ([size] * site.world, [size * rank + rank for rank in range(site.world)]):
        for numpy in (False,) if in_torch(site) else (False, True):
            for row in site.run(uneven, sizes, numpy):
                assert all(row)


@without_gpu
@pytest.mark.parametrize("size", [0, 3, 600, 40_000])
def test_lists_of_even_and_uneven_parts(site: Site, size: int) -> None:
    check_uneven(site, size)


@pytest.mark.parametrize("world", [1, 5])
def test_lists_of_parts_in_other_worlds(pools: Pools, world: int) -> None:
    for size in (3, 40_000):
        check_uneven(Site(world).on(pools(world)), size)


def in_place(rank: Rank) -> list[bool]:
    """A rank's own part may be what it gives, or what it gets."""
    me, world, comm = rank.rank, rank.world_size, rank.comm
    whole = torch.zeros(world, 9_000)
    whole[me] = me + 1
    fastcoll.all_gather(list(whole), whole[me], comm)
    results = [bool((whole[by] == by + 1).all()) for by in range(world)]
    whole = torch.full((world, 9_000), float(me))
    fastcoll.gather(whole[me], list(whole) if me == 1 else None, 1, comm)
    results += [bool((whole[by] == (by if me == 1 else me)).all()) for by in range(world)]
    whole = torch.full((world, 9_000), float(me))
    fastcoll.gather_single(whole[me], whole, 1, comm)
    results += [bool((whole[by] == (by if me == 1 else me)).all()) for by in range(world)]
    whole = torch.arange(world).float()[:, None].repeat(1, 9_000)
    fastcoll.scatter(whole[me], list(whole) if me == 1 else None, 1, comm)
    results += [bool((whole[by] == by).all()) for by in range(world)]
    whole = torch.ones(world, 9_000)
    fastcoll.reduce_scatter(whole[me], list(whole), group=comm)
    return [
        *results,
        *(bool((whole[by] == (world if by == me else 1)).all()) for by in range(world)),
    ]


def test_a_ranks_own_part_in_place(pools: Pools) -> None:
    for row in pools(3).run(in_place):
        assert all(row)


# CopyWays::past_caches in csrc/cpu/copy.h: from here on a rank's own part is copied in another way.
PAST_CACHES = 4 << 20


def large_own_parts(rank: Rank, starts: list[tuple[int, int]]) -> list[bool]:
    """Whether parts at odd places arrive whole, and nothing beside them is touched."""
    found = []
    for given_start, got_start in starts:
        numel = 2 * (PAST_CACHES + given_start + 7)
        given = torch.randint(0, 251, (given_start + numel,), dtype=torch.uint8)[given_start:]
        memory = torch.full((got_start + numel + 64,), 255, dtype=torch.uint8)
        got = memory[got_start : got_start + numel]
        fastcoll.all_to_all_single(got, given, group=rank.comm)
        half, me = numel // 2, rank.rank
        found.append(torch.equal(got[me * half :][:half], given[me * half :][:half]))
        found.append(not (got == 255).any())
        found.append(bool((memory[:got_start] == 255).all()))
        found.append(bool((memory[got_start + numel :] == 255).all()))
    return found


def test_large_own_parts_at_any_address(pools: Pools) -> None:
    starts = [(0, 0), (1, 0), (0, 1), (15, 63), (33, 17)]
    for found in pools(2).run(large_own_parts, starts):
        assert found == [True] * 4 * len(starts)


# CopyWays::fetched_past_caches there, on the CPUs that have most: the same for what a peer gives.
FETCHED_PAST_CACHES = 32 << 20


def large_parts_of_a_peer(rank: Rank, starts: list[tuple[int, int]]) -> list[bool]:
    """Whether a broadcast and an exchange at odd places are whole, with nothing beside touched."""
    numel = FETCHED_PAST_CACHES + 7
    peer = 1 - rank.rank

    def given_by(who: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(who)
        return torch.randint(0, 251, (numel,), dtype=torch.uint8, generator=random)

    found = []
    for given_start, got_start in starts:
        given = torch.empty(given_start + numel, dtype=torch.uint8)[given_start:]
        given.copy_(given_by(rank.rank))
        memory = torch.full((got_start + numel + 64,), 255, dtype=torch.uint8)
        got = memory[got_start : got_start + numel]
        rank.comm.broadcast(given if rank.rank else got, 1)
        found.append(torch.equal(given if rank.rank else got, given_by(1)))
        got.fill_(255)
        sent = rank.comm.isend(given, peer)
        rank.comm.recv(got, peer)
        sent.wait()
        found.append(torch.equal(got, given_by(peer)))
        found.append(bool((memory[:got_start] == 255).all()))
        found.append(bool((memory[got_start + numel :] == 255).all()))
    return found


@pytest.mark.long
def test_large_parts_of_a_peer_at_any_address(pools: Pools) -> None:
    starts = [(0, 0), (33, 17)]
    for found in pools(2).run(large_parts_of_a_peer, starts):
        assert found == [True] * 4 * len(starts)


def numpy_shuffle(rank: Rank) -> list[float]:
    out = np.empty(rank.world_size)
    fastcoll.all_to_all_single(out, np.arange(rank.world_size) + 10.0 * rank.rank, group=rank.comm)
    return list(out)


def test_numpy_arrays(pools: Pools) -> None:
    assert pools(2).run(numpy_shuffle) == [[0.0, 10.0], [1.0, 11.0]]
