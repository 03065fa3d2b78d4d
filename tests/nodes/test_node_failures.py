# SPDX-License-Identifier: Apache-2.0
"""Faults that only nodes can have end in one named error on every rank, soon.

That deaths, stops, late ranks and aborts do stands in faults/test_every_fault.py.
"""

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import fastcoll
from fastcoll.nodes import arguments
from tests.nodes.test_node_transfers import num_threads
from tests.support.harness import LATE_S, TIMEOUT_S, Attempt, Pool, Rank, Setup, attempt

FreshPool = Callable[[int, Setup], Pool]


def cluster(fresh_pool: FreshPool, nodes: str = "aabb", timeout_s: float = TIMEOUT_S) -> Pool:
    return fresh_pool(len(nodes), Setup(nodes=nodes, timeout_s=timeout_s))


def counts_without(rank: Rank, absent: int, limit_s: float) -> Attempt:
    """One rank leaves an all_to_all in whose middle sizes are told, once all have agreed on it."""

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


def other_sizes(rank: Rank, group: Any) -> Attempt:
    return attempt(group.all_reduce, torch.ones(3 + (rank.rank == 0)))


def other_messages(rank: Rank, group: Any) -> Attempt:
    if rank.rank == 1:
        return attempt(group.barrier)
    verb = group.send if rank.rank == 0 else group.recv
    return attempt(verb, torch.ones(3 + rank.rank), 2 - rank.rank)


def aborts(rank: Rank, group: Any) -> Attempt:
    """Rank 0 does, when the others wait for it: one of the other node, and one of its own."""
    if rank.rank > 0:
        return attempt(group.barrier)
    time.sleep(0.1)
    group.abort()
    return attempt(group.check)


def leaves(rank: Rank, group: Any) -> Attempt:
    if rank.rank == 2:
        group.close()
    return attempt(group.barrier)


def break_groups(rank: Rank, way: Callable[..., Attempt]) -> list[tuple[int, int]]:
    """Return how many threads and descriptors the process has after each of ten groups."""
    kept = []
    for _ in range(10):
        with rank.comm.new_group() as group:
            group.all_reduce(torch.ones(3))
            assert way(rank, group).kind
        del group
        gc.collect()
        rank.comm.barrier()
        kept.append((num_threads(), sum(1 for _ in Path("/proc/self/fd").iterdir())))
    return kept


@pytest.mark.parametrize(
    "way", [other_sizes, other_messages, aborts, pytest.param(leaves, marks=pytest.mark.long)]
)
def test_groups_that_broke_leave_nothing_behind(fresh_pool: FreshPool, way: Any) -> None:
    """But the last one, while a peer has still to leave it; a rank has two lanes here at most."""
    for first, *_, last in cluster(fresh_pool, "aab").run(break_groups, way):
        for before, after in zip(first, last, strict=True):
            assert after <= before + 4, (first, last)


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
            self._is_deaf = not self._inner.started.is_success() and bool(later)
            return not self._is_deaf
        return False

    def wait(self) -> object:
        return self._inner.wait()


def call_deaf(rank: Rank, numel: int) -> Attempt:
    if rank.rank == 0:
        carrier = rank.comm._lanes.carrier(0)
        exchange, gather = carrier.all_to_all, carrier.all_gather
        carrier.all_to_all = lambda *args: Deaf(exchange(*args))
        carrier.all_gather = lambda *args: Deaf(gather(*args))
    tensor = torch.ones(numel)
    while not (found := attempt(rank.comm.all_reduce, tensor)).kind:
        pass
    return found


@pytest.mark.slow
def test_a_transfer_that_hears_of_nothing_does_not_hold_up_the_others(
    fresh_pool: FreshPool,
) -> None:
    """Gloo does not tell the one in whose middle a connection broke; those behind it do."""
    limit_s = 20.0
    pool = cluster(fresh_pool, "ab", limit_s)
    pool.start(call_deaf, 100_000_000)  # of 100 segments, several under way at once
    time.sleep(1)
    # By now all are started that may be at once. The connection must not break in the middle of the
    # last one, behind which there is nothing that could tell.
    os.kill(pool.pids[1], signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(pool.pids[1], signal.SIGKILL)
    first = pool.collect()[0].value
    assert (first.kind, first.ranks) == ("PeerLostError", (1,)), first
    assert first.seconds < limit_s / 2, first


def end_in_a_call(rank: Rank) -> Attempt:
    """Rank 0's part of a node is closed, as when its process ends while a daemon is in a call."""
    rank.comm.all_reduce(torch.ones(3))
    if rank.rank == 0:
        rank.comm._node_group.close()
    return attempt(rank.comm.all_reduce, torch.ones(3))


def test_a_process_that_ends_in_a_call_is_named(fresh_pool: FreshPool) -> None:
    for one in cluster(fresh_pool, "aab").run(end_in_a_call):
        assert (one.kind, one.ranks) == ("PeerLostError", (0,)), one
