# SPDX-License-Identifier: Apache-2.0
"""The survivors go on: after a death, a stop, an abort, in subgroups, and if more die meanwhile."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastcoll
from fastcoll.bootstrap.mesh import Mesh, is_stopped
from fastcoll.group.communicator import Communicator
from tests.support.harness import LATE_S, Pool, Rank, attempt
from tests.support.held import list_held
from tests.support.waiting import wait_until


def use(group: Any) -> list[float]:
    """A call of each kind of path; the results do not depend on who is left, but on how many."""
    found = []
    for numel in (1, 5000, 300_000):
        tensor = torch.ones(numel)
        group.all_reduce(tensor)
        found += torch.unique(tensor).tolist()
    symmetric = group.empty((70_000,)).fill_(2)
    group.all_reduce(symmetric)
    found += torch.unique(symmetric).tolist()
    part = group.new_group()
    part.all_reduce(tensor)
    part.close()
    if group.world_size > 1:
        if group.rank == 0:
            group.send(torch.ones(3), 1)
        if group.rank == 1:
            group.recv(tensor[:3], 0)
    return [*found, float(group.rank), float(group.world_size)]


def good(rank: int, size: int) -> list[float]:
    return [float(size)] * 3 + [2.0 * size, rank, size]


def break_and_shrink(rank: Rank, rounds: int) -> list[Any]:
    """Again and again, without a death: an abort, a mismatch, or nothing at all before."""
    group, found = rank.comm.new_group(), []
    for number in range(rounds):
        tensor = group.empty((1000,)).fill_(rank.rank)
        if number % 3 == 0 and rank.rank == 0:
            group.abort("on purpose")
        if number % 3 == 1:
            attempt(group.all_reduce, torch.ones(3 + rank.rank))
        group = group.shrink()
        assert tensor.tolist() == [float(rank.rank)] * 1000
        group.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 1000
        del tensor
        group.barrier()
        found.append(list_held())
    name = group.name
    group.close()
    return [found, name]


def test_nobody_has_to_die(fresh_pool: Callable[..., Pool]) -> None:
    """Everything that a group held is given back each time; all members stay, in their order."""
    for found, name in fresh_pool(3).run(break_and_shrink, 9):
        assert name == "world/1:9"
        assert found[1:] == found[:1] * 8


def push_until_error(rank: Rank, numel: int) -> Any:
    """Symmetric tensors: every rank writes into every other's memory."""
    one_more = fastcoll.zeros(1000)
    one_more += 7
    tensor = fastcoll.zeros(numel)
    address = tensor.data_ptr()
    rank.tell(f"rank {rank.rank} has memory")
    failed = ""
    while not failed:
        failed = attempt(fastcoll.all_reduce, tensor, timeout_s=1.5).kind
    again = attempt(fastcoll.shrink, timeout_s=0.5)
    rank.tell(f"rank {rank.rank} went on")
    after = attempt(fastcoll.all_reduce, tensor) if rank.rank == 1 else None
    tensor.fill_(3)
    early = torch.unique(tensor).tolist()
    if rank.rank != 1:
        time.sleep(1.5)  # rank 1 goes on meanwhile
    late = torch.unique(tensor).tolist()
    assert tensor.data_ptr() == address
    kept = torch.unique(one_more).tolist()
    if rank.rank != 1:
        fastcoll.all_reduce(tensor)
    return failed, again, early, late, kept, torch.unique(tensor).tolist(), after


@pytest.mark.slow
def test_a_rank_stopped_in_the_middle_of_a_push(fresh_pool: Callable[..., Pool]) -> None:
    """Left out after the limit; when it goes on it hears so and writes nothing of the others'."""
    pool = fresh_pool(3)
    pool.start(push_until_error, 4_000_000)
    for rank in range(3):
        pool.wait_for(f"rank {rank} has memory")
    time.sleep(0.3)
    os.kill(pool.pids[1], signal.SIGSTOP)
    for survivor in (0, 2):
        pool.wait_for(f"rank {survivor} went on")
    os.kill(pool.pids[1], signal.SIGCONT)
    rows = pool.finish()
    for rank, (failed, again, early, late, kept, summed, after) in enumerate(rows):
        assert failed == "CollectiveTimeout"
        assert early == late == [3.0]
        assert kept == [7.0]
        if rank == 1:
            assert again.kind == "PeerLostError"
            assert again.ranks == (1,)
            assert "went on without rank 1" in again.text
            assert after.kind == "UsageError"
        else:
            assert again.kind == ""
            assert 0.4 <= again.seconds < 0.5 + LATE_S
            assert summed == [6.0]


def around(
    name: str,
    act: Callable[[], None],
    before: Callable[[Any], bool] = lambda argument: False,
    after: Callable[[Any], bool] = lambda result: False,
) -> None:
    """Have this process do something in a method that reaches for what the ranks share.

    `before` is asked with its last argument, `after` with its result.
    """
    owner: Any = Mesh if name == "send" else Communicator
    method = getattr(owner, name)

    def changed(*args: Any) -> Any:
        if before(args[-1]):
            act()
        result = method(*args)
        if after(result):
            act()
        return result

    setattr(owner, name, changed)


def die_on_the_way(rank: Rank, victim: int, point: str) -> Any:
    """Rank 3 is killed; `victim` follows in the middle of the agreement."""
    if rank.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = attempt(rank.comm.barrier)
    if rank.rank == victim:
        name, number = point.split()
        accesses = itertools.count()
        when: dict[str, Any] = {"before": lambda _: next(accesses) == int(number)}
        if number == "heard":
            when = {"after": bool}
        around(name, lambda: os.kill(os.getpid(), signal.SIGKILL), **when)
    group, tries = rank.comm, 0
    while True:
        group = fastcoll.shrink(group)
        tries += 1
        one = attempt(group.all_reduce, torch.ones(3))
        if not one.kind:
            return lost.kind, tries, use(group)


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        (0, "send 1"),
        (0, "decide_survivors heard"),
        (1, "decide_survivors 0"),
        *(
            pytest.param(victim, point, marks=pytest.mark.slow)
            for victim, point in (
                (0, "send 0"),
                (0, "send 2"),
                (0, "hold_parts 0"),
                (1, "send 1"),
                (1, "decide_survivors heard"),
            )
        ),
    ],
)
def test_a_second_death_in_the_middle_of_the_agreement(
    fresh_pool: Callable[..., Pool], victim: int, point: str
) -> None:
    pool = fresh_pool(4)
    outcomes = pool.outcomes(die_on_the_way, victim, point)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    survivors = [outcome for outcome in outcomes if outcome.rank not in (victim, 3)]
    for new_rank, outcome in enumerate(survivors):
        assert outcome.ok, outcome.describe()
        kind, tries, found = outcome.value
        assert kind == "PeerLostError"
        assert tries <= 2
        assert found == good(new_rank, 2)
    assert len({outcome.value[1] for outcome in survivors}) == 1


def stop_on_the_way(rank: Rank) -> Any:
    """Each takes the other for late: rank 0 has not joined yet, rank 1 is about to go on alone."""
    around(
        ("send", "decide_survivors")[rank.rank],
        lambda: os.kill(os.getpid(), signal.SIGSTOP),
        before=bool,
    )
    return attempt(rank.comm.shrink, timeout_s=0.3)


@pytest.mark.slow
def test_of_two_ranks_that_are_stopped_in_turn_one_goes_on(
    fresh_pool: Callable[..., Pool],
) -> None:
    """With messages and clocks alone both did, each for itself."""
    pool = fresh_pool(2)
    pool.start(stop_on_the_way)
    for pid in pool.pids:
        wait_until(lambda pid=pid: is_stopped(pid))
    os.kill(pool.pids[0], signal.SIGCONT)
    first = pool.collect(ranks=[0])[0].value
    os.kill(pool.pids[1], signal.SIGCONT)
    second = pool.collect(ranks=[1])[0].value
    assert first.kind == ""
    assert second.kind == "PeerLostError"
    assert second.ranks == (1,)
    assert "ranks [0] went on without rank 1" in second.text


def shrink_subgroups(rank: Rank) -> list[Any]:
    """Of two halves and the whole, each loses rank 3 by itself."""
    halves = [rank.comm.new_group([0, 1]), rank.comm.new_group([2, 3])]
    half = halves[rank.rank // 2]
    half.barrier()
    rank.comm.barrier()
    if rank.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = attempt(half.barrier)
    if rank.rank == 2:
        half = fastcoll.shrink(half)
    found = use(half)
    whole = fastcoll.shrink(rank.comm)
    return [lost.kind, half.name, found, use(whole), whole.rank]


def test_subgroups(fresh_pool: Callable[..., Pool]) -> None:
    outcomes = fresh_pool(4).outcomes(shrink_subgroups)
    rows = [outcome.value for outcome in outcomes[:3]]
    assert [row[0] for row in rows] == ["", "", "PeerLostError"]
    assert [row[1] for row in rows] == ["world/1", "world/1", "world/2:1"]
    assert [row[2] for row in rows] == [good(0, 2), good(1, 2), good(0, 1)]
    assert [row[3] for row in rows] == [good(rank, 3) for rank in range(3)]


def come_late(rank: Rank) -> Any:
    """Rank 2 is busy elsewhere while the others shrink; rank 0 is in a call of the broken group."""
    group = rank.comm.new_group(timeout_s=20)
    if rank.rank == 0:
        threading.Thread(target=attempt, args=(group.barrier,)).start()
        time.sleep(0.2)
    if rank.rank == 2:
        time.sleep(3.0)
    start = time.monotonic()
    found = attempt(group.shrink, timeout_s=1.0)
    return found, time.monotonic() - start, attempt(group.shrink).kind


@pytest.mark.slow
def test_who_comes_too_late_is_left_out(fresh_pool: Callable[..., Pool]) -> None:
    first, second, third = fresh_pool(3).run(come_late)
    for one, seconds, again in (first, second):
        assert one.kind == ""
        assert 0.5 < seconds < 1.0 + LATE_S
        assert again == "UsageError"
    assert third[0].kind == "PeerLostError"
    assert third[0].ranks == (2,)
    assert third[1] < LATE_S
