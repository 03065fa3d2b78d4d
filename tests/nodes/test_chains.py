# SPDX-License-Identifier: Apache-2.0
"""Sends and receives that wait for each other over nodes: the rank that holds all up is named."""

from collections.abc import Callable

import pytest
import torch

from tests.support.harness import Attempt, Pool, Rank, Setup, attempt

LIMIT_S = 3.0
NODES = "aabb"
# Each rank that receives, and its sender; the last one of each chain makes no call.
CHAINS = {
    "within a node": {2: 3},
    "from node to node": {0: 2, 2: 1},
    "into a node": {0: 2, 2: 3},
    "out of a node": {2: 3, 3: 0},
}


def in_a_chain(rank: Rank, name: str) -> list[Attempt]:
    """The first receives with a limit, the others without one that counts.

    Those who are in no chain fail later, and for them the store no longer answers in time: they
    know the verdict from their node.
    """
    chain = CHAINS[name]
    group = rank.comm
    if rank.rank in chain:
        limit_s = LIMIT_S if rank.rank == next(iter(chain)) else 60.0
        tensor = torch.ones(6)[:: 2 - rank.rank // 2]  # of ranks 0 and 1 in pieces
        found = [attempt(group.recv, tensor, chain[rank.rank], timeout_s=limit_s)]
        rank.tell(f"rank {rank.rank} failed")
    else:
        found = []
        group._board.decide_verdict = lambda error, sequence: error
        for waiting in chain:
            rank.wait_for(f"rank {waiting} failed")
    return [*found, attempt(group.barrier)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "from node to node" else pytest.mark.slow)
        for name in CHAINS
    ],
)
def test_the_rank_that_holds_up_a_chain_is_named(
    fresh_pool: Callable[[int, Setup], Pool], name: str
) -> None:
    pool = fresh_pool(len(NODES), Setup(nodes=NODES, timeout_s=30.0))
    rows = pool.run(in_a_chain, name)
    last = list(CHAINS[name].values())[-1]
    for one in (one for row in rows for one in row):
        assert one.kind == "CollectiveTimeout", one
        assert one.ranks == (last,), one
    chained = [one for rank in CHAINS[name] if rank != last for one in rows[rank]]
    assert len({one.text for one in chained}) == 1, chained


def in_a_cycle(rank: Rank, other: int) -> Attempt:
    peer = {0: other, other: 0}.get(rank.rank)
    if peer is None:
        return attempt(rank.comm.barrier)
    return attempt(rank.comm.recv, torch.ones(6), peer, timeout_s=LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("other", [1, 2], ids=["within a node", "between nodes"])
def test_a_cycle_is_shown_once(fresh_pool: Callable[[int, Setup], Pool], other: int) -> None:
    pool = fresh_pool(len(NODES), Setup(nodes=NODES, timeout_s=30.0))
    for one in pool.run(in_a_cycle, other):
        assert one.kind == "CollectiveTimeout", one
        assert one.text.count("a cycle") == 1, one
