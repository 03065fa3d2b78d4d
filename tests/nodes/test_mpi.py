# SPDX-License-Identifier: Apache-2.0
"""MPI as the carrier, under Open MPI's mpiexec: every verb, what can't work, what ends a wait."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fastcoll.nodes.carriers.mpi import MpiCarrier
from fastcoll.nodes.carriers.mpi_progress import PROGRESS
from tests.contract.test_differences import check_each_form
from tests.nodes.everything import check_everything
from tests.nodes.mpi_pool import MpiPool, require_open_mpi
from tests.nodes.test_verbs import LARGE_SIZE
from tests.support.calls import Call, expected
from tests.support.draw import VERBS
from tests.support.harness import Attempt, Pool, Rank, Setup, attempt
from tests.support.perform import Result, compare, perform_all
from tests.support.sites import across, ranks_by_node

pytestmark = pytest.mark.slow
CARRIER = {"FASTCOLL_CARRIER": "mpi"}
LIMIT_S = 5.0
MakePool = Callable[[str], MpiPool]


@pytest.fixture(scope="module")
def open_mpi() -> Iterator[MakePool]:
    """`open_mpi("aab")` is a pool of three ranks on two nodes."""
    install = require_open_mpi()
    pools: dict[str, MpiPool] = {}

    def get(nodes: str) -> MpiPool:
        if nodes not in pools or not pools[nodes].is_open:
            pools[nodes] = MpiPool(install, len(nodes), Setup(nodes=nodes, env=CARRIER))
        return pools[nodes]

    yield get
    for pool in pools.values():
        pool.close()


def carriers(rank: Rank) -> str:
    return type(rank.comm._lanes.carrier(0)).__name__


@pytest.mark.parametrize("nodes", ["aabb", "aaab"])
def test_every_verb_dtype_and_size(open_mpi: MakePool, nodes: str) -> None:
    pool = open_mpi(nodes)
    assert set(pool.run(carriers)) == {"MpiCarrier"}
    check_everything(pool, nodes)


def perform_counted(rank: Rank, calls: list[Call]) -> tuple[list[Result], dict[str, int]]:
    """Make calls; the results, and how often MPI was asked for what."""
    asked = dict.fromkeys(("all_reduce", "all_gather", "all_to_all"), 0)
    carrier = rank.comm._lanes.carrier(0)

    def counted(what: str) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            asked[what] += 1
            return getattr(MpiCarrier, what)(carrier, *args)

        return count

    with contextlib.ExitStack() as stack:
        for what in asked:
            stack.enter_context(mock.patch.object(carrier, what, counted(what)))
        return perform_all(rank, calls), asked


def assert_mpi_is_asked(pool: Pool, nodes: str, calls: list[Call], wanted: str, not_: str) -> None:
    pool.start(perform_counted, calls)
    wants = [expected(call, len(nodes), ranks_by_node(nodes)) for call in calls]
    results, counts = zip(*pool.finish(), strict=True)
    assert compare(calls, wants, results) == []
    for asked in counts:
        assert asked[wanted] >= len(calls)
        assert asked[not_] == 0


def fast_calls(world: int) -> list[Call]:
    """Those that MPI may reduce itself: none of half types, which it lacks."""
    return [
        Call(verb, dtype, LARGE_SIZE, op, numerics="fast", root=root)
        for verb, root in (("all_reduce", 0), ("reduce", world - 1))
        for dtype in ("float32", "float64")
        for op in ("SUM", "PRODUCT")
    ]


def test_mpi_reduces_what_it_may(open_mpi: MakePool) -> None:
    nodes = "aabb"
    assert_mpi_is_asked(open_mpi(nodes), nodes, fast_calls(4), "all_reduce", "all_gather")


def test_three_nodes(open_mpi: MakePool) -> None:
    """Where MPI gathers shards, and reduces nothing: one of three would send twice as much."""
    nodes = "aabbcc"
    pool, world = open_mpi(nodes), len(nodes)
    site = across(nodes).on(pool)
    for verb in VERBS:
        site.check(site.small_calls(verb))
    dtypes = ("float32", "float64", "float16", "bfloat16")
    usual = [Call("all_reduce", dtype, LARGE_SIZE, numerics=None) for dtype in dtypes]
    fast = [one for one in fast_calls(world) if one.verb == "all_reduce"]
    assert_mpi_is_asked(pool, nodes, [*usual, *fast], "all_gather", "all_reduce")


def send_huge(rank: Rank) -> int:
    """A message of more bytes than an `int` counts, of which most stay untouched by the sender."""
    huge = torch.zeros((2 << 30) + 5, dtype=torch.uint8)
    if rank.rank == 0:
        huge[-1] = 7
        rank.comm.send(huge, 1)
    else:
        rank.comm.recv(huge, 0)
    return int(huge[-1])


def test_a_message_of_more_than_two_gib(open_mpi: MakePool) -> None:
    assert open_mpi("ab").run(send_huge) == [7, 7]


def polled_lanes(rank: Rank) -> tuple[list[str], int]:
    """Lanes that are polled behind groups that this rank, or another one, has ended."""
    before = len(PROGRESS._communicators)
    kinds = []
    for ends in range(2):
        with rank.comm.new_group() as group:
            group.barrier()
            rank.comm.barrier()  # all have left the other one
            if rank.rank == ends:
                group.abort()
            kinds.append(attempt(group.barrier).kind)
        rank.comm.barrier()
    return kinds, len(PROGRESS._communicators) - before


def test_a_lane_of_a_group_that_broke_is_not_polled(open_mpi: MakePool) -> None:
    assert open_mpi("aabb").run(polled_lanes) == [(["AbortedError"] * 2, 0)] * 4


def test_a_mismatch_between_nodes_is_seen(open_mpi: MakePool) -> None:
    check_each_form(across("aabb").on(open_mpi("aabb")), LARGE_SIZE)


def until_broken(rank: Rank) -> Attempt:
    found = Attempt("", "", 0)
    tensor = torch.ones(100_000)
    while not found.kind:
        found = attempt(rank.comm.all_reduce, tensor, timeout_s=LIMIT_S)
    return found


def test_a_stopped_node_is_named_at_the_limit(open_mpi: MakePool) -> None:
    pool = open_mpi("aabb")
    pool.start(until_broken)
    time.sleep(0.5)
    for pid in pool.pids[2:]:
        os.kill(pid, signal.SIGSTOP)
    try:
        found = [one.value for one in pool.collect(ranks=[0, 1])]
    finally:
        pool.close(grace_s=0.2)  # nobody else uses its group
    assert len({one.text for one in found}) == 1, found
    for one in found:
        assert one.kind == "CollectiveTimeout", one
        assert "node 1" in one.text
        assert "ranks 2, 3" in one.text
    assert max(one.seconds for one in found) < LIMIT_S + 8
