# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between nodes ends in one named error on every rank, soon."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from tests.support.harness import LATE_S, TIMEOUT_S, Attempt, Pool, Rank, Setup, attempt

LIMIT_S = 4.0  # where it is waited for

FreshPool = Callable[[int, Setup], Pool]


def cluster(fresh_pool: FreshPool, nodes: str = "aabb", timeout_s: float = TIMEOUT_S) -> Pool:
    return fresh_pool(len(nodes), Setup(nodes=nodes, timeout_s=timeout_s))


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda comm, op: comm.all_reduce(torch.ones(90_000), op.SUM),
    "another op": lambda comm, op: comm.all_reduce(torch.ones(90_000), op.MAX),
    "another dtype": lambda comm, op: comm.all_reduce(torch.ones(90_000).int(), op.SUM),
    "another size": lambda comm, op: comm.all_reduce(torch.ones(80_000), op.SUM),
    "a small size": lambda comm, op: comm.all_reduce(torch.ones(8), op.SUM),
    "another numerics": lambda comm, op: comm.all_reduce(
        torch.ones(90_000), op.SUM, numerics="fast"
    ),
    "another verb": lambda comm, op: comm.broadcast(torch.ones(90_000), 0),
    "root 0": lambda comm, op: comm.broadcast(torch.ones(90_000), 0),
    "root 1": lambda comm, op: comm.broadcast(torch.ones(90_000), 1),
}
SLOW = pytest.mark.slow
MISMATCHES = [
    ("all_reduce", "another size"),
    *(
        pytest.param("all_reduce", name, marks=SLOW)
        for name in ("another op", "another dtype", "a small size", "another numerics")
    ),
    pytest.param("all_reduce", "another verb", marks=SLOW),
    pytest.param("root 0", "root 1", marks=SLOW),
]


def call(rank: Rank, names: list[str]) -> Attempt:
    import fastcoll

    return attempt(CALLS[names[rank.rank]], rank.comm, fastcoll.ReduceOp)


def assert_one_verdict(found: list[Attempt], kind: str, *words: str) -> None:
    assert {one.kind for one in found} == {kind}, found
    assert len({one.text for one in found}) == 1, found
    for word in words:
        assert word in found[0].text


@pytest.mark.parametrize(("usual", "other"), MISMATCHES)
def test_a_mismatch_between_nodes_is_seen(fresh_pool: FreshPool, usual: str, other: str) -> None:
    found = cluster(fresh_pool).run(call, [usual, usual, other, other])
    assert_one_verdict(found, "DesyncError", "ranks [0]", "ranks [2]")
    assert max(one.seconds for one in found) < LATE_S


def test_a_mismatch_within_a_node_reaches_the_others(fresh_pool: FreshPool) -> None:
    names = ["all_reduce", "all_reduce", "all_reduce", "another op"]
    found = cluster(fresh_pool).run(call, names)
    assert_one_verdict(found, "DesyncError", "ranks [2]", "ranks [3]", "MAX")
    assert max(one.seconds for one in found) < LATE_S


def split_sizes(rank: Rank) -> Attempt:
    sizes = [1, 1, 1, 1]
    expected = [1, 1, 1, 1 + (rank.rank == 0)]
    target, source = torch.empty(sum(expected)), torch.ones(4)
    return attempt(rank.comm.all_to_all_single, target, source, expected, sizes)


@pytest.mark.slow
def test_split_sizes_that_do_not_fit_are_seen(fresh_pool: FreshPool) -> None:
    found = cluster(fresh_pool).run(split_sizes)
    assert_one_verdict(found, "DesyncError", "rank 3 gives rank 0 4 bytes", "expects 8")


def counts_without(rank: Rank, absent: int, limit_s: float) -> Attempt:
    """One rank leaves an all_to_all in whose middle sizes are told, once all have agreed on it."""
    import fastcoll
    from fastcoll.nodes import arguments

    def leave(*_: Any) -> Any:
        time.sleep(3 * limit_s)
        raise fastcoll.PeerLostError("the test says so", [absent])

    comm, world = rank.comm, rank.world_size
    comm.barrier()
    if rank.rank == absent:
        arguments._all_to_all = leave
    source, sizes = torch.ones(2 * world), [2] * world
    return attempt(
        comm.all_to_all_single, torch.zeros(2 * world), source, sizes, sizes, timeout_s=limit_s
    )


@pytest.mark.slow
def test_what_is_told_within_a_call_has_its_limit(fresh_pool: FreshPool) -> None:
    """The group's own is longer than all that this test may take."""
    limit_s = 2.0
    found = cluster(fresh_pool, "abc", timeout_s=5 * TIMEOUT_S).run(counts_without, 2, limit_s)
    for one in found[:2]:
        assert one.kind == "CollectiveTimeout", one
        assert "all_to_all #" in one.text
        assert one.seconds < limit_s + LATE_S


def calls_until_broken(rank: Rank, numel: int, first_wait_s: float = 0.0) -> list[Attempt]:
    """Call until an error comes; then once more: the verdict holds."""
    tensor = torch.ones(numel)
    end = time.monotonic() + 25
    found = Attempt("", "", 0)
    while not found.kind and time.monotonic() < end:
        found = attempt(rank.comm.all_reduce, tensor)
    return [found, attempt(rank.comm.barrier)]


@pytest.mark.parametrize(
    ("victim", "numel"),
    [
        (2, 8),
        pytest.param(2, 4_000_000, marks=SLOW),
        pytest.param(3, 8, marks=SLOW),
        (3, 4_000_000),
    ],
)
def test_a_killed_rank_is_named_everywhere(fresh_pool: FreshPool, victim: int, numel: int) -> None:
    pool = cluster(fresh_pool, timeout_s=LIMIT_S)
    pool.start(calls_until_broken, numel)
    time.sleep(0.5)
    os.kill(pool.pids[victim], signal.SIGKILL)
    killed = time.monotonic()
    found = [one.value for one in pool.collect() if one.rank != victim]
    assert time.monotonic() - killed < LIMIT_S + LATE_S
    assert_one_verdict([first for first, _ in found], "PeerLostError")
    assert {first.ranks for first, _ in found} == {(victim,)}
    assert all(again.text == first.text for first, again in found)


@pytest.mark.slow
@pytest.mark.parametrize("numel", [8, 4_000_000])
def test_a_killed_node_is_named(fresh_pool: FreshPool, numel: int) -> None:
    pool = cluster(fresh_pool, "abb", LIMIT_S)
    pool.start(calls_until_broken, numel)
    time.sleep(0.5)
    for victim in (1, 2):
        os.kill(pool.pids[victim], signal.SIGKILL)
    [first, _] = pool.collect()[0].value
    if numel > 8 and first.kind == "CollectiveTimeout":
        # Gloo tells nothing to the message that it was in the middle of; nobody is left who could.
        assert first.ranks == (1, 2), first
    else:
        # Whether the last breath of a rank reached the board, or none did.
        assert first.kind == "PeerLostError", first
        assert set(first.ranks) <= {1, 2}
        assert first.ranks
    assert first.seconds < LIMIT_S + LATE_S


class Deaf:
    """A transfer that never hears that it failed, if a later one of its lane could tell."""

    started: ClassVar[list["Deaf"]] = []

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._is_deaf = False
        self.started.append(self)

    def is_completed(self) -> bool:
        if not self._is_deaf and self._inner.is_completed():
            later = self.started[self.started.index(self) + 1 :]
            self._is_deaf = not self._inner.is_success() and bool(later)
            return not self._is_deaf
        return False

    def wait(self) -> object:
        return self._inner.wait()


def call_deaf(rank: Rank, numel: int) -> list[Attempt]:
    if rank.rank == 0:
        carrier = rank.comm._lanes.carrier(0)
        exchange, gather = carrier.all_to_all, carrier.all_gather
        carrier.all_to_all = lambda *args: Deaf(exchange(*args))
        carrier.all_gather = lambda *args: Deaf(gather(*args))
    return calls_until_broken(rank, numel)


@pytest.mark.slow
def test_a_transfer_that_hears_of_nothing_does_not_hold_up_the_others(
    fresh_pool: FreshPool,
) -> None:
    """Gloo does not tell the one in whose middle a connection broke; those behind it do."""
    limit_s = 20.0
    pool = cluster(fresh_pool, "ab", limit_s)
    pool.start(call_deaf, 100_000_000)  # of 100 segments, several under way at once
    time.sleep(1)
    # Until all are started that may be at once: the connection must not break in the middle of the
    # last one, behind which there is nothing that could tell.
    os.kill(pool.pids[1], signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(pool.pids[1], signal.SIGKILL)
    [first, _] = pool.collect()[0].value
    assert (first.kind, first.ranks) == ("PeerLostError", (1,)), first
    assert first.seconds < limit_s / 2, first


@pytest.mark.slow
def test_a_stopped_node_is_named_at_the_limit(fresh_pool: FreshPool) -> None:
    pool = cluster(fresh_pool, timeout_s=LIMIT_S)
    pool.start(calls_until_broken, 8)
    time.sleep(0.5)
    for victim in (2, 3):
        os.kill(pool.pids[victim], signal.SIGSTOP)
    stopped = time.monotonic()
    found = [one.value for one in pool.collect(ranks=[0, 1])]
    assert time.monotonic() - stopped < LIMIT_S + LATE_S
    assert_one_verdict([first for first, _ in found], "CollectiveTimeout", "node 1", "ranks 2, 3")
    assert {first.ranks for first, _ in found} == {(2, 3)}
    for victim in (2, 3):
        os.kill(pool.pids[victim], signal.SIGCONT)
    late = [one.value for one in pool.collect(ranks=[2, 3])]
    assert_one_verdict([first for first, _ in late], "CollectiveTimeout", "node 1")


def one_stays_away(rank: Rank, absent: int) -> Attempt:
    if rank.rank == absent:
        time.sleep(LIMIT_S + 1)
    return attempt(rank.comm.barrier)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(fresh_pool: FreshPool) -> None:
    found = cluster(fresh_pool, timeout_s=LIMIT_S).run(one_stays_away, 3)
    assert_one_verdict(found, "CollectiveTimeout", "[3]")
    assert {one.ranks for one in found} == {(3,)}


def aborted(rank: Rank) -> Attempt:
    if rank.rank == 3:
        time.sleep(0.3)
        rank.comm.abort("the test says so")
    return attempt(rank.comm.all_reduce, torch.ones(10))


def test_abort_reaches_all_nodes(fresh_pool: FreshPool) -> None:
    found = cluster(fresh_pool).run(aborted)
    assert_one_verdict(found, "AbortedError", "by rank 3 of 4", "the test says so")
    assert max(one.seconds for one in found) < LATE_S


def goes_on_after_bad_arguments(rank: Rank) -> list[str]:
    comm, tensor = rank.comm, torch.ones(4)
    kinds = [
        attempt(comm.all_reduce, tensor, algorithm="ring").kind,
        attempt(comm.all_reduce, "tensor").kind,
        attempt(comm.broadcast, tensor, 4).kind,
        attempt(comm.recv, tensor, 4).kind,
        attempt(comm.all_reduce, tensor, numerics="exact").kind,
    ]
    comm.all_reduce(tensor)
    assert (tensor == rank.world_size).all()
    return kinds


def test_bad_arguments_leave_the_group_usable(fresh_pool: FreshPool) -> None:
    wrong, unsupported = "UsageError", "UnsupportedError"
    for found in cluster(fresh_pool).run(goes_on_after_bad_arguments):
        assert found == [unsupported, wrong, wrong, wrong, wrong]
