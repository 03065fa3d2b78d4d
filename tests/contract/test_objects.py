# SPDX-License-Identifier: Apache-2.0
"""Collectives of Python objects, and the barrier that names who is missing."""

import os
import pickle
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import fastcoll
from fastcoll.calls.objects import _ROOM_BYTES
from tests.support.backends import TorchGroup
from tests.support.fallbacks import noting
from tests.support.harness import Attempt, Pools, Rank, attempt
from tests.support.sites import Site, without_gpu


def how(weights_only: bool) -> dict[str, bool]:
    """The option, left out where it is the default, as torch's functions lack it."""
    return {"weights_only": True} if weights_only else {}


def every_verb(rank: Rank, root: int, weights_only: bool = False) -> list[Any]:
    me, world, comm, safe = rank.rank, rank.world_size, rank.comm, how(weights_only)
    mine = {"rank": me, "text": "x" * (1000 * me), "nothing": None}
    everything = [None] * world
    comm.all_gather_object(everything, mine, **safe)
    known: list[Any] = [(1, 2), {root}] if me == root else [None, "replaced"]
    comm.broadcast_object_list(known, root, **safe)
    gathered = [None] * world if me == root else None
    comm.gather_object([me], gathered, root, **safe)
    part: list[Any] = ["replaced", "kept"]
    given = [f"for {rank}" for rank in range(world)] if me == root else None
    comm.scatter_object_list(part, given, root, **safe)
    return [everything, known, gathered, part]


def check_every_verb(run: Callable[..., list[Any]], world: int, weights_only: bool) -> None:
    """Run `every_verb` with each root, and look at the objects."""
    everything = [{"rank": r, "text": "x" * (1000 * r), "nothing": None} for r in range(world)]
    for root in range(world):
        for rank, row in enumerate(run(every_verb, root, weights_only)):
            gathered = [[one] for one in range(world)] if rank == root else None
            assert row == [everything, [(1, 2), {root}], gathered, [f"for {rank}", "kept"]]


@without_gpu
def test_every_verb_and_root(site: Site) -> None:
    check_every_verb(site.run, site.world, weights_only=False)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_verb_of_weights_alone(pools: Pools, world: int) -> None:
    check_every_verb(pools(world).run, world, weights_only=True)


def passed_on(rank: Rank) -> list[str]:
    """The verbs that known calls with objects leave to Python."""
    every_verb(rank, 0)
    fastcoll.monitored_barrier(rank.comm)
    with noting() as passed:
        every_verb(rank, 0)
        fastcoll.monitored_barrier(rank.comm)
        known = [verb for verb, _ in passed]
        with pytest.raises(fastcoll.UsageError):
            rank.comm.all_reduce("bad input, which no call site can know")
    assert [verb for verb, _ in passed[len(known) :]] == ["all_reduce"], passed
    return known


def test_known_calls_with_objects_are_fast_calls(pools: Pools) -> None:
    assert pools(2).run(passed_on) == [[], []]


def filling(room_bytes: int) -> bytes:
    """An object that takes as many bytes packed."""
    fixed_bytes = len(pickle.dumps(bytes(300))) - 300
    return bytes(range(1, 251)).ljust(room_bytes - fixed_bytes, b"\0")


def of_each_size(rank: Rank) -> list[Any]:
    """Objects that just fit into a packet, and that do not, by each verb: rank 1 has the odd ones.

    Beside each result is the number of calls that it took.
    """
    me, world, comm = rank.rank, rank.world_size, rank.comm
    found: list[Any] = []

    def count(verb: Callable[..., Any], *args: Any) -> None:
        before = sum(stats.calls for stats in comm.stats().values())
        verb(*args)
        found.append(sum(stats.calls for stats in comm.stats().values()) - before)

    for room_bytes in (_ROOM_BYTES - 1, _ROOM_BYTES, _ROOM_BYTES + 1):
        odd = filling(room_bytes)
        mine: Any = odd if me == 1 else me
        everything, part, gathered = [None] * world, [None], [None] * world
        count(comm.all_gather_object, everything, mine)
        count(comm.gather_object, mine, gathered if me == 0 else None, 0)
        given = [odd if to == 0 else to for to in range(world)] if me == 1 else None
        count(comm.scatter_object_list, part, given, 1)
        listed = [odd[:-20]] if me == 1 else [None]  # a list takes a few bytes, too
        count(comm.broadcast_object_list, listed, 1)
        got = [None]
        if me == 0:
            comm.recv_object_list(got, 1)
        elif me == 1:
            comm.send_object_list([odd], 0)
        assert everything == [odd if of == 1 else of for of in range(world)]
        assert me != 0 or gathered == everything
        assert part == [odd if me == 0 else me]
        assert listed == [odd[:-20]]
        assert me != 0 or got == [odd]
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_objects_that_fit_into_a_packet_take_one_call(pools: Pools, world: int) -> None:
    assert len(pickle.dumps(filling(_ROOM_BYTES))) == _ROOM_BYTES
    for calls in pools(world).run(of_each_size):
        assert calls == [1, 1, 1, 1] * 2 + [2, 2, 2, 1]


def passed_around(rank: Rank, weights_only: bool) -> list[Any]:
    """A list to the next rank, from whom it is known, then from anyone, which torch can't."""
    me, world, comm, safe = rank.rank, rank.world_size, rank.comm, how(weights_only)
    found: list[Any] = []

    def send() -> None:
        comm.send_object_list([{"from": me}, "x" * 5000], (me + 1) % world, **safe)

    if world == 1:
        return [attempt(send).kind]

    before = (me - 1) % world
    for source in (before, before if isinstance(comm, TorchGroup) else None):
        got: list[Any] = [None, "replaced"]
        if me == 0:
            send()
        sender = comm.recv_object_list(got, source, **safe)
        if me != 0:
            send()
        found += [sender, got]
    return found


def check_passed_around(rows: list[Any]) -> None:
    if len(rows) == 1:  # a send to oneself would wait for its own recv
        assert rows == [["UsageError"]]
        return
    for rank, found in enumerate(rows):
        before = (rank - 1) % len(rows)
        assert found == [before, [{"from": before}, "x" * 5000]] * 2


@without_gpu
def test_lists_passed_around(site: Site) -> None:
    check_passed_around(site.run(passed_around, False))


@pytest.mark.parametrize("world", [2, 3])
def test_lists_of_weights_passed_around(pools: Pools, world: int) -> None:
    check_passed_around(pools(world).run(passed_around, True))


def send_lists_of_other_lengths(rank: Rank) -> list[str]:
    if rank.rank == 0:
        rank.comm.send_object_list([1, 2], 1)
        rank.comm.send_object_list([3], 1)
        return []
    one = attempt(rank.comm.recv_object_list, ["kept"], 0)
    got: list[Any] = [None]
    rank.comm.recv_object_list(got, 0)
    return [one.kind, one.text, *map(str, got)]


def test_a_list_of_another_length_is_received_and_refused(pools: Pools) -> None:
    [_, (kind, text, next_one)] = pools(2).run(send_lists_of_other_lengths)
    assert (kind, next_one) == ("UsageError", "3")
    assert "has 1 objects, but rank 0 sent 2" in text


class OnlyForRankOne:
    """Says in which process it was unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        assert fastcoll.api.groups.default_group().rank == 1
        self.__dict__ |= state

    def __init__(self) -> None:
        self.text = "its own"


def scatter_private(rank: Rank) -> str:
    part: list[Any] = [None]
    given = [1, OnlyForRankOne(), 3] if rank.rank == 0 else None
    rank.comm.scatter_object_list(part, given, 0)
    return str(getattr(part[0], "text", part[0]))


def test_nobody_unpickles_what_is_for_others(pools: Pools) -> None:
    assert pools(3).run(scatter_private) == ["1", "its own", "3"]


class RunsCode:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, int, bool]]:
        return os.makedirs, (self.path, 0o777, True)


def give_code(rank: Rank, folder: Path, weights_only: bool) -> list[Attempt]:
    """An object of rank 0 that makes folders where it arrives; by each verb."""
    comm, world = rank.comm, rank.world_size
    names = iter("abcde")

    def mine() -> Any:
        name = next(names)
        return RunsCode(str(folder / f"{name}{rank.rank}")) if rank.rank == 0 else 1

    at_root = rank.rank == 0
    safe: dict[str, Any] = {"weights_only": weights_only}
    found = [
        attempt(comm.all_gather_object, [None] * world, mine(), **safe),
        attempt(comm.gather_object, mine(), None if at_root else [None] * world, 1, **safe),
        attempt(comm.broadcast_object_list, [mine()], 0, **safe),
        attempt(comm.scatter_object_list, [None], [1, mine()] if at_root else None, 0, **safe),
    ]
    found.append(
        attempt(comm.send_object_list, [mine()], 1, **safe)
        if at_root
        else attempt(comm.recv_object_list, [None], 0, **safe)
    )
    return found


def test_weights_only_runs_no_code(pools: Pools, tmp_path: Path) -> None:
    zero, one = pools(2).run(give_code, tmp_path, True)
    assert [found.kind for found in one] == ["UnpicklingError"] * 5
    assert [found.kind for found in zero] == ["UnpicklingError", "", "UnpicklingError", "", ""]
    assert not list(tmp_path.iterdir())
    pools(2).run(give_code, tmp_path, False)
    assert {path.name[0] for path in tmp_path.iterdir()} == set("abcde"), "pickle does"


def packed_otherwise(rank: Rank) -> list[Attempt]:
    comm, weights_only = rank.comm, rank.rank == 0
    found = [
        attempt(comm.all_gather_object, [0, 0], 1, weights_only=weights_only),
        attempt(comm.broadcast_object_list, [1], 0, weights_only=weights_only),
    ]
    comm.barrier()
    return found


def test_ranks_that_differ_in_weights_only(pools: Pools) -> None:
    zero, one = pools(2).run(packed_otherwise)
    assert zero[1].kind == ""  # the root of a broadcast gets nothing
    for found in (zero[0], *one):
        assert found.kind == "UsageError"
        assert "weights_only=True" in found.text
        assert "weights_only=False" in found.text


def lengths_differ(rank: Rank) -> list[str]:
    kinds = [attempt(rank.comm.broadcast_object_list, [1] * (1 + rank.rank), 0).kind]
    return [*kinds, attempt(rank.comm.barrier).kind]


def test_lists_of_other_lengths(pools: Pools) -> None:
    assert pools(2).run(lengths_differ) == [["", ""], ["UsageError", ""]]


def gather_to_two(rank: Rank) -> list[Attempt]:
    me, world = rank.rank, rank.world_size
    found = [attempt(rank.comm.gather_object, me, [None] * world, me)]
    group = rank.comm.new_group()
    if me == 0:
        found.append(attempt(group.all_gather_object, [None] * world, me))
    else:
        found.append(attempt(group.gather_object, me, None, 0))
    group.close()
    return found


def test_another_destination_or_verb_is_no_gather(pools: Pools) -> None:
    for destination, verb in pools(3).run(gather_to_two):
        assert destination.kind == verb.kind == "DesyncError", (destination, verb)
        assert "rank 0: 0, rank 1: 1, rank 2: 2" in destination.text


def wait_for_late_ranks(rank: Rank, late: tuple[int, ...]) -> Attempt:
    """Late ranks come when the others no longer wait for them."""
    group = rank.comm.new_group()
    fastcoll.monitored_barrier(group)
    others = [one for one in range(rank.world_size) if one not in late]
    for other in others if rank.rank in late else ():
        rank.wait_for(f"rank {other} missed {late}")
    one = attempt(fastcoll.monitored_barrier, group, timedelta(seconds=2))
    rank.tell(f"rank {rank.rank} missed {late}")
    group.close()
    return one


@pytest.mark.parametrize(
    ("nodes", "late"),
    [("", (1, 2)), ("aab", (2,)), ("aab", (0, 1)), ("aab", (1, 2)), ("aabb", (1, 2))],
)
def test_a_monitored_barrier_names_all_who_are_late(
    pools: Pools, clusters: Pools, nodes: str, late: tuple[int, ...]
) -> None:
    pool = clusters(nodes) if nodes else pools(4)
    for one in pool.run(wait_for_late_ranks, late):
        assert one.kind == "CollectiveTimeout", one
        assert one.ranks == late
        assert " timeout " in one.text  # one of the words by which programs know such an error
        assert all(re.search(rf"ranks? .*\b{rank}\b", one.text) for rank in late), one
