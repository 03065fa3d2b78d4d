# SPDX-License-Identifier: Apache-2.0
"""The handles of asynchronous calls: whose they are, and small calls that rest until asked for."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastcoll
from tests.support.harness import Pool, Pools, Rank, attempt
from tests.support.sites import Site, of_fastcoll
from tests.support.verb_calls import KNOWN, VERB_CALLS, nobody
from tests.support.waiting import wait_until

# How many tensors a call's Work has, where that is not one: at the root, and on the other ranks.
NUM_OUTPUTS: dict[str, Callable[[int], tuple[int, int]]] = {
    "all_reduce_coalesced": lambda world: (2, 2),
    "all_gather": lambda world: (world, world),
    "gather": lambda world: (world, 0),
    "gather_single": lambda world: (1, 0),
    "all_to_all": lambda world: (world, world),
    "barrier": lambda world: (0, 0),
}


def every_verb(rank: Rank) -> dict[str, tuple[list[str], bool, list[bool]]]:
    """Each verb: the first call of a kind is planned in Python, the last C++ carries out."""
    world, found = rank.world_size, {}
    for name, call in VERB_CALLS.items():
        if not call.is_async:
            continue
        given, got = call.tensors(world, numel=5)
        works = [call.make(rank.comm, given, got, async_op=True) for _ in range(2)]
        works[-1].wait()  # the second is behind the first, in C++'s queue or in Python's
        works.append(call.make(rank.comm, given, got, async_op=True))
        results = [work.result() for work in works]
        mine = got if call.writes(rank.rank) or call.reads is nobody else given
        count = NUM_OUTPUTS.get(name, lambda world: (1, 1))(world)[rank.rank > 0]
        same = [len(result) == count and (not count or result[0] is mine) for result in results]
        num_bytes = [sum(one.nbytes for one in result) for result in results]
        kinds = [type(work).__name__ for work in (works[0], works[-1])]
        found[name] = kinds, [work.num_bytes() for work in works] == num_bytes, same
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_a_work_knows_its_outputs(fresh_pool: Callable[..., Pool], world: int) -> None:
    for found in fresh_pool(world).run(every_verb):
        for name, ((_, last), has_size, same) in found.items():
            assert (last, has_size, same) == ("CallWork", True, [True] * 3), name
        assert {first for (first, _), _, _ in found.values()} == {"QueuedWork", "CallWork"}


def wait_for_half_a_call(rank: Rank) -> dict[str, Any]:
    """A small call is begun where it is made and rests: what goes on with it, and what ends it."""
    facts: dict[str, Any] = {}
    group = fastcoll.new_group()
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    if rank.rank == 1:
        rank.wait_for("too late")
        facts["late"] = attempt(group.all_reduce(tensor, async_op=True).wait).kind
        rank.wait_for("all is over")
        facts["mismatch"] = attempt(group.barrier).kind
        return facts
    work = group.all_reduce(tensor, async_op=True)
    facts["at once"] = attempt(work.wait, 0.05).kind
    facts["asked"] = work.is_completed()
    facts["again"] = attempt(work.wait, 0.05).kind
    rank.tell("too late")
    facts["late"] = attempt(work.wait).kind
    work = group.all_reduce(tensor, async_op=True)
    rank.tell("all is over")
    facts["mismatch"] = attempt(work.wait).kind
    facts["error"] = type(work.exception()).__name__
    facts["after"] = attempt(group.all_reduce(tensor, async_op=True).wait).kind
    return facts


def test_half_a_call(pools: Pools) -> None:
    first, second = pools(2).run(wait_for_half_a_call)
    assert first == {
        "at once": "CollectiveTimeout",
        "asked": False,
        "again": "CollectiveTimeout",
        "late": "",
        "mismatch": "DesyncError",
        "error": "DesyncError",
        "after": "DesyncError",
    }
    assert second == {"late": "", "mismatch": "DesyncError"}


def time_out_in_half_a_call(rank: Rank) -> Any:
    group = fastcoll.new_group()
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    found = None
    if rank.rank == 0:
        work = group.all_reduce(tensor, async_op=True, timeout_s=0.5)
        failed = attempt(work.wait)
        found = failed.kind, failed.ranks, attempt(work.wait).kind
        rank.tell("it is over")
    else:
        rank.wait_for("it is over")
    group.close()
    return found


def test_half_a_call_has_a_limit(pools: Pools) -> None:
    first, _ = pools(2).run(time_out_in_half_a_call)
    assert first == ("CollectiveTimeout", (1,), "CollectiveTimeout")


SIZES = [3, 300, 5000, 16000]  # elements: in one line, in several, staged, more than may rest


def ahead_of_the_peer(rank: Rank, name: str, numel: int) -> list[Any]:
    """Rank 0 begins before rank 1 comes, and waits after rank 1 is through."""
    call, event = VERB_CALLS[name], f"{name} of {numel}"
    given, want = call.tensors(2, numel=numel)
    got = call.laid(want)
    call.make(rank.comm, given, want)
    if rank.rank == 1:
        rank.wait_for(f"{event} begun")
    work = call.make(rank.comm, given, got, async_op=True)
    if rank.rank == 0:
        rank.tell(f"{event} begun")
        rank.wait_for(f"{event} over")
    work.wait()  # rank 1 does not need rank 0 to wait
    if rank.rank == 1:
        rank.tell(f"{event} over")
    return [type(work).__name__, work.exception(), torch.equal(got, want)]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", [name for name, call in VERB_CALLS.items() if call.is_async])
def test_nobody_waits_for_one_that_rests(pools: Pools, name: str, numel: int) -> None:
    assert pools(2).run(ahead_of_the_peer, name, numel) == [["CallWork", None, True]] * 2


def give_more_than_there_is_room_for(rank: Rank) -> list[float]:
    """Rank 0 fills its scratch, which rank 1 reads later, and begins another call."""
    large, small = torch.ones(1 << 18), torch.full((2000,), 3.0)
    for tensor in (large, small):
        rank.comm.broadcast(tensor, 0)
    if rank.rank == 1:
        rank.wait_for("the scratch is full")
    rank.comm.broadcast(large, 0)  # of which rank 0 is through when all is staged
    work = rank.comm.broadcast(small, 0, async_op=True)
    if rank.rank == 0:
        rank.tell("the scratch is full")
    work.wait()
    return [large.sum().item(), small.sum().item()]


def test_beginning_a_call_does_not_wait_for_room(pools: Pools) -> None:
    assert pools(2).run(give_more_than_there_is_room_for) == [[float(1 << 18), 6000.0]] * 2


def stay(*alive: weakref.ref[Any]) -> bool:
    """Say whether any is kept for long. The thread of a call lets go a moment after its end."""

    def are_collected() -> bool:
        gc.collect()
        return all(one() is None for one in alive)

    try:
        return not wait_until(are_collected)
    except AssertionError:
        return True


def in_cycles(rank: Rank) -> list[str]:
    """Tensors that have their call's handle, and a group that has one; return what stays."""
    comm, left, peer = rank.comm, [], (rank.rank + 1) % rank.world_size
    calls = {name: verb.make for name, verb in VERB_CALLS.items() if verb.is_async}
    for turn in range(KNOWN + 1):
        for name, make in calls.items():
            given, got = VERB_CALLS[name].tensors(rank.world_size)
            given.work = got.work = make(comm, given, got, async_op=True)
            given.work.wait()
            alive = [weakref.ref(one) for one in (given, got)]
            del given, got
            left += [f"{name}, turn {turn}"] if stay(*alive) else []
        given, got = torch.ones(5), torch.ones(5)
        given.work, got.work = comm.isend(given, peer), comm.irecv(got)
        given.work.wait(), got.work.wait()
        alive = [weakref.ref(one) for one in (given, got)]
        del given, got
        left += [f"a transfer, turn {turn}"] if stay(*alive) else []
        group = comm.new_group()
        for _ in range(turn + 1):
            group.last = group.all_reduce(torch.ones(3), async_op=True)
            group.last.wait()
        comm.barrier()
        alive_group = weakref.ref(group)
        del group
        left += [f"a group, turn {turn}"] if stay(alive_group) else []
    return left


@of_fastcoll
def test_handles_in_cycles_are_collected(site: Site) -> None:
    assert site.run(in_cycles) == [[]] * site.world


def collected_on_the_way(rank: Rank, calls: bool, has_handle: bool) -> list[bool]:
    """A call, or a receive, goes on though its handle is in a cycle that nobody holds any more."""
    comm, told = rank.comm, f"rank 0 has collected: {calls}, {has_handle}"
    tensor = torch.ones(70_000)
    for _ in range(KNOWN):
        comm.all_reduce(tensor)
    tensor.fill_(1)
    if rank.rank == 1:
        rank.wait_for(told)
        comm.all_reduce(tensor) if calls else comm.send(tensor, 0)
        comm.barrier()
        return []
    memory, alive = tensor.numpy(), weakref.ref(tensor)
    work = comm.all_reduce(tensor, async_op=True) if calls else comm.irecv(tensor, 1)
    if has_handle:
        tensor.work = work
    cycle = [work]
    cycle.append(cycle)
    del tensor, work, cycle
    gc.collect()
    is_kept = alive() is not None
    rank.tell(told)
    comm.barrier()
    return [is_kept, bool((memory == (2 if calls else 1)).all())]


@pytest.mark.parametrize("has_handle", [True, False])  # else the collector clears the handle
@pytest.mark.parametrize("calls", [True, False])
def test_a_call_that_goes_on_is_not_collected(pools: Pools, calls: bool, has_handle: bool) -> None:
    assert pools(2).run(collected_on_the_way, calls, has_handle)[0] == [True, True]
