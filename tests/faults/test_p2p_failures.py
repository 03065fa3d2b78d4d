# SPDX-License-Identifier: Apache-2.0
"""Sends and receives that go wrong: a cycle of them, wrong arguments, a group that is closed.

Late, lost and stopped peers are those of test_every_fault.py and test_fault_points.py. The text of
each error, and messages of a peer that left, stand in protocol/native.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.contract.test_p2p import around
from tests.support.harness import LATE_S, Attempt, Pools, Rank, attempt
from tests.support.sites import Site, of_fastcoll


def sends_in_a_cycle(rank: Rank) -> list[Attempt]:
    group = rank.comm.new_group()
    group.barrier()
    right = (rank.rank + 1) % rank.world_size
    attempts = [
        attempt(group.send, torch.ones(100_000), right, timeout_s=0.5),
        attempt(group.barrier),
    ]
    group.close()
    return attempts


def test_a_cycle_of_blocking_sends_is_shown(pools: Pools) -> None:
    rows = pools(3).run(sends_in_a_cycle)
    for row in rows:
        for one in row:
            assert one.kind == "CollectiveTimeout", one
            for rank in range(3):
                assert f"sends to rank {rank}" in one.text
            assert "cycle" in one.text
        assert row[0].seconds < LATE_S
    assert len({one.text for row in rows for one in row}) == 1


def mistakes(rank: Rank) -> list[str]:
    comm, some, wrong = rank.comm, torch.ones(3), []
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "no such rank": (lambda: comm.send(some, 2), "dst=2"),
        "below 0": (lambda: comm.recv(some, -1), "src=-1"),
        "nobody": (lambda: comm.send(some, None), "dst"),
        "tag": (lambda: comm.isend(some, 0, "a"), "tag"),
        "tag below 0": (lambda: comm.irecv(some, 0, -1), "tag"),
        "list": (lambda: comm.send([1.0], 0), "list"),
        "expanded": (lambda: comm.recv(torch.ones(1).expand(3), 0), "expanded"),
        "limit": (lambda: comm.send(some, 0, timeout_s=0), "timeout_s"),
    }
    for name, (call, words) in calls.items():
        one = attempt(call)
        if one.kind != "UsageError" or words not in one.text:
            wrong.append(f"{name}: {one}")
    return wrong


@pytest.mark.parametrize("nodes", ["aa", "ab"])
def test_mistakes_are_refused_and_do_no_harm(pools: Pools, clusters: Pools, nodes: str) -> None:
    pool = pools(2) if nodes == "aa" else clusters(nodes)
    assert pool.run(mistakes) == [[], []]
    assert pool.run(around, "one by one") == [[], []]


def closed_under_a_receive(rank: Rank) -> str:
    group = rank.comm.new_group()
    work = group.irecv(torch.ones(1000), (rank.rank + rank.world_size // 2) % rank.world_size)
    group.barrier()
    group.close()
    kind = attempt(work.wait).kind
    assert type(work.exception()).__name__ == kind
    assert work.is_completed()
    assert not work.is_success()
    return kind


@of_fastcoll
def test_closing_ends_what_is_open(site: Site) -> None:
    """On the rank that leaves first; others may hear that their peer has left."""
    kinds = site.run(closed_under_a_receive)
    assert set(kinds) <= {"UsageError", "PeerLostError"}
    assert "UsageError" in kinds
