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
from calls import Call, expected
from everything import check_everything
from mpi_pool import MpiPool, require_open_mpi
from perform import Result, compare, perform_all
from test_node_failures import assert_one_verdict, call
from test_verbs import LARGE_SIZE, SIZES, check, moves, ranks_by_node, reductions

from fastcoll.hierarchical.mpi_carrier import MpiCarrier
from harness import Attempt, Pool, Rank, Setup, attempt

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


def test_three_nodes(open_mpi: MakePool) -> None:
    """Where MPI itself reduces (within what numerics="fast" allows) and gathers shards."""
    nodes = "aabbcc"
    pool, world = open_mpi(nodes), len(nodes)
    check(pool, nodes, [*reductions(world, SIZES), *moves(world, SIZES)])
    wide, halves = ("float32", "float64"), ("float16", "bfloat16")
    by_mpi = [
        Call(verb, dtype, LARGE_SIZE, op, numerics="fast", root=root)
        for verb, root in (("all_reduce", 0), ("reduce", world - 1))
        for dtype in wide
        for op in ("SUM", "PRODUCT")
    ]
    # Half types are none of MPI's: they keep the bits under the default, too.
    as_bytes = [Call("all_reduce", dtype, LARGE_SIZE, numerics=None) for dtype in (*wide, *halves)]
    for calls, wanted, unwanted in (
        (by_mpi, "all_reduce", "all_gather"),
        (as_bytes, "all_gather", "all_reduce"),
    ):
        pool.start(perform_counted, calls)
        wants = [expected(call, world, ranks_by_node(nodes)) for call in calls]
        results, counts = zip(*pool.finish(), strict=True)
        assert compare(calls, wants, results) == []
        for asked in counts:
            assert asked[wanted] >= len(calls)
            assert asked[unwanted] == 0


@pytest.fixture
def broken_pool(open_mpi: MakePool) -> Iterator[Pool]:
    """Ranks for one test, which may break them."""
    pool = open_mpi("aabb")
    yield pool
    pool.close(grace_s=0.2)


def test_a_mismatch_between_nodes_is_seen(broken_pool: Pool) -> None:
    found = broken_pool.run(call, ["all_reduce", "all_reduce", "another size", "another size"])
    assert_one_verdict(found, "DesyncError", "ranks [0]", "ranks [2]")


def until_broken(rank: Rank) -> Attempt:
    found = Attempt("", "", 0)
    tensor = torch.ones(100_000)
    while not found.kind:
        found = attempt(rank.comm.all_reduce, tensor, timeout_s=LIMIT_S)
    return found


def test_a_stopped_node_is_named_at_the_limit(broken_pool: Pool) -> None:
    broken_pool.start(until_broken)
    time.sleep(0.5)
    for pid in broken_pool.pids[2:]:
        os.kill(pid, signal.SIGSTOP)
    found = [one.value for one in broken_pool.collect(ranks=[0, 1])]
    assert_one_verdict(found, "CollectiveTimeout", "node 1", "ranks 2, 3")
    assert max(one.seconds for one in found) < LIMIT_S + 8
