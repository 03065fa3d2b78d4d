# SPDX-License-Identifier: Apache-2.0
"""Collectives of Python objects, and the barrier that names who is missing."""

import os
import resource
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.harness import Attempt, Pool, Pools, Rank, attempt


def every_verb(rank: Rank, root: int, weights_only: bool = False) -> list[Any]:
    import fastcoll

    me, world, comm = rank.rank, rank.world_size, rank.comm
    mine = {"rank": me, "text": "x" * (1000 * me), "nothing": None}
    everything = [None] * world
    fastcoll.all_gather_object(everything, mine, comm, weights_only)
    known: list[Any] = [(1, 2), {root}] if me == root else [None, "replaced"]
    fastcoll.broadcast_object_list(known, root, comm, weights_only=weights_only)
    gathered = [None] * world if me == root else None
    fastcoll.gather_object([me], gathered, root, comm, weights_only=weights_only)
    part: list[Any] = ["replaced", "kept"]
    given = [f"for {rank}" for rank in range(world)] if me == root else None
    fastcoll.scatter_object_list(part, given, root, comm, weights_only=weights_only)
    return [everything, known, gathered, part]


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_verb_and_root(pools: Pools, world: int, weights_only: bool) -> None:
    everything = [{"rank": r, "text": "x" * (1000 * r), "nothing": None} for r in range(world)]
    for root in range(world):
        for rank, row in enumerate(pools(world).run(every_verb, root, weights_only)):
            gathered = [[one] for one in range(world)] if rank == root else None
            assert row == [everything, [(1, 2), {root}], gathered, [f"for {rank}", "kept"]]


def passed_on(rank: Rank) -> list[str]:
    """The verbs that known calls with objects leave to Python."""
    import fastcoll
    from fastcoll import _C
    from fastcoll.api import VERBS

    passed: list[str] = []

    def recorded(verb: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            passed.append(verb)
            return VERBS[verb](*args, **options)

        return call

    every_verb(rank, 0)
    fastcoll.monitored_barrier(rank.comm)
    for verb in VERBS:
        _C.set_fallback(verb, recorded(verb))
    try:
        every_verb(rank, 0)
        fastcoll.monitored_barrier(rank.comm)
        known = passed.copy()
        with pytest.raises(fastcoll.UsageError):
            rank.comm.all_reduce("bad input, which no call site can know")
    finally:
        for verb, function in VERBS.items():
            _C.set_fallback(verb, function)
    assert passed[len(known) :] == ["all_reduce"], passed
    return known


def test_known_calls_with_objects_are_fast_calls(pools: Pools) -> None:
    assert pools(2).run(passed_on) == [[], []]


def passed_around(rank: Rank, weights_only: bool) -> list[Any]:
    """A list to the next rank, from whom it is known, then from anyone."""
    import fastcoll

    me, world, comm = rank.rank, rank.world_size, rank.comm
    found: list[Any] = []

    def send() -> None:
        message = [{"from": me}, "x" * 5000]
        fastcoll.send_object_list(message, (me + 1) % world, comm, weights_only=weights_only)

    for source in ((me - 1) % world, None):
        got: list[Any] = [None, "replaced"]
        if me == 0:
            send()
        sender = fastcoll.recv_object_list(got, source, comm, weights_only=weights_only)
        if me != 0:
            send()
        found += [sender, got]
    return found


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_lists_passed_around(pools: Pools, world: int, weights_only: bool) -> None:
    for rank, found in enumerate(pools(world).run(passed_around, weights_only)):
        before = (rank - 1) % world
        assert found == [before, [{"from": before}, "x" * 5000]] * 2


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
        import fastcoll

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


def mistakes(rank: Rank) -> list[Attempt]:
    comm, world = rank.comm, rank.world_size
    return [
        attempt(comm.all_gather_object, [None] * (world + 1), 1),
        attempt(comm.gather_object, 1, None, rank.rank),
        attempt(comm.broadcast_object_list, [1], world),
        attempt(comm.scatter_object_list, [], [1] * world, rank.rank),
        attempt(comm.scatter_object_list, [None], [1], rank.rank),
        attempt(comm.send_object_list, (1, 2), 0),
        attempt(comm.send_object_list, [1], world),
        attempt(comm.recv_object_list, None, 0),
    ]


def test_mistakes_are_refused_and_do_no_harm(pools: Pools) -> None:
    for row in pools(2).run(mistakes):
        assert [one.kind for one in row] == ["UsageError"] * 8
    assert pools(2).run(every_verb, 0)[1][3] == ["for 1", "kept"]


def lengths_differ(rank: Rank) -> list[str]:
    kinds = [attempt(rank.comm.broadcast_object_list, [1] * (1 + rank.rank), 0).kind]
    return [*kinds, attempt(rank.comm.barrier).kind]


def test_lists_of_other_lengths(pools: Pools) -> None:
    assert pools(2).run(lengths_differ) == [["", ""], ["UsageError", ""]]


LARGE_BYTES = 40 << 20  # more than malloc ever keeps for itself


def memory(name: str) -> int:
    """Bytes of this process, by a line of its status."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) << 10


def peak(rank: Rank, verb: Callable[[], Any]) -> float:
    """By how many times a large object this process grew at most in a call."""
    rank.comm.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is used now
    before = memory("VmRSS")
    verb()
    return (memory("VmHWM") - before) / LARGE_BYTES


def peaks(rank: Rank, weights_only: bool) -> dict[str, float]:
    """What each verb takes for large objects; ranks 0 and 1 send and receive."""
    comm, me, world = rank.comm, rank.rank, rank.world_size
    numbers = np.arange(LARGE_BYTES, dtype=np.uint8)
    mine: Any = torch.from_numpy(numbers) if weights_only else numbers.tobytes()
    safe: dict[str, Any] = {"weights_only": weights_only}
    at_root = me == 0
    found = {}

    def measure(name: str, verb: Callable[..., Any], *args: Any) -> None:
        found[name] = peak(rank, lambda: verb(*args, **safe))

    measure("gather", comm.gather_object, mine, [None] * world if at_root else None, 0)
    measure("all_gather", comm.all_gather_object, [None] * world, mine)
    measure("broadcast", comm.broadcast_object_list, [mine] if at_root else [None], 0)
    given = [mine] * world if at_root else None
    measure("scatter", comm.scatter_object_list, [None], given, 0)
    if me == 0:
        measure("send", comm.send_object_list, [mine], 1)
    elif me == 1:
        measure("recv", comm.recv_object_list, [None], 0)
    else:
        comm.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("weights_only", [False, True])
def test_memory_of_large_objects(fresh_pool: Callable[..., Pool], weights_only: bool) -> None:
    require_little_memory(fresh_pool(3).run(peaks, weights_only), weights_only)


def require_little_memory(rows: list[dict[str, float]], weights_only: bool) -> None:
    """A rank has what it gives packed, or what it gets; besides the objects that it gets."""
    world = len(rows)
    # torch packs a tensor's memory by way of a copy of it.
    given, spare = 1 + weights_only, 0.7
    for rank, found in enumerate(rows):
        assert found["all_gather"] < world + given + spare, (rank, found)
        at_root = rank == 0
        most = {
            "gather": world + given if at_root else given,
            "broadcast": given if at_root else 2,
            "scatter": world + given - 1 if at_root else 2,
            "send": given,
            "recv": 2,
        }
        for verb, copies in most.items():
            assert found.get(verb, 0) < copies + spare, (rank, verb, found)


HUGE_BYTES = 160 << 20  # more than malloc ever keeps reserved


def without_memory(rank: Rank) -> list[Attempt]:
    """Rank 1 has no memory for what rank 0 gives."""
    comm, me = rank.comm, rank.rank
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mine = bytes(HUGE_BYTES if me == 0 else 1)
    rows = torch.zeros(HUGE_BYTES if me == 0 else 3, dtype=torch.uint8)
    splits = [0, len(rows), 0] if me == 0 else [1, 1, 1]
    gathered = [None] * 3
    if me == 1:
        resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + HUGE_BYTES // 2, limits[1]))
    found = [
        attempt(comm.all_gather_object, [None] * 3, mine),
        attempt(comm.gather_object, mine, gathered if me == 1 else None, 1),
        attempt(comm.broadcast_object_list, [mine], 0),
        attempt(comm.scatter_object_list, [None], [mine] * 3 if me == 0 else None, 0),
        attempt(comm.all_to_all_single, None, rows, None, splits),
    ]
    resource.setrlimit(resource.RLIMIT_AS, limits)
    comm.gather_object(mine, gathered if me == 1 else None, 1)
    assert me != 1 or [len(one) for one in gathered if one] == [HUGE_BYTES, 1, 1]
    return found


@pytest.mark.slow
def test_who_has_no_memory_says_so_to_all(fresh_pool: Callable[..., Pool]) -> None:
    for found in fresh_pool(3).run(without_memory):
        assert [one.kind for one in found] == ["DriverError"] * 5, found
        for one in found:
            assert "rank 1: " in one.text
            assert "can still be used" in one.text


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


def missing(rank: Rank) -> Attempt | None:
    import fastcoll

    group = rank.comm.new_group()
    fastcoll.monitored_barrier(group)
    one = None
    if rank.rank in (0, 3):
        one = attempt(fastcoll.monitored_barrier, group, timedelta(seconds=0.8))
        rank.tell(f"rank {rank.rank} missed some")
    else:
        for waiter in (0, 3):
            rank.wait_for(f"rank {waiter} missed some")
    group.close()
    return one


def test_a_monitored_barrier_names_all_who_are_missing(pools: Pools) -> None:
    first, _, _, last = pools(4).run(missing)
    for one in (first, last):
        assert one.kind == "CollectiveTimeout"
        assert one.ranks == (1, 2)
        assert "rank 1" in one.text
        assert "rank 2" in one.text
