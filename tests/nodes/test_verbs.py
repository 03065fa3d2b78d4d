# SPDX-License-Identifier: Apache-2.0
"""Calls that only several nodes have: segments, a group's own numerics, subgroups.

The verbs themselves stand in contract/test_values.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from tests.support.calls import MOVES, ROOTED, Call
from tests.support.harness import Pool, Rank
from tests.support.perform import perform_all
from tests.support.sites import across

Clusters = Callable[[str], Pool]
LARGE_SIZE = 700_001  # several segments, and no lane's chunk is whole


def in_segments() -> list[Call]:
    """Calls of several segments."""
    calls = [
        Call(verb, dtype, LARGE_SIZE, "SUM", numerics="same_bits")
        for verb in ("all_reduce", "reduce_scatter")
        for dtype in ("float32", "bfloat16")
    ]
    return calls + [
        Call(verb, "float32", LARGE_SIZE, root=1 if verb in ROOTED else 0) for verb in MOVES
    ]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["aabb", "aaabbc"])
def test_messages_of_several_segments(clusters: Clusters, nodes: str) -> None:
    across(nodes).on(clusters(nodes)).check(in_segments())


def perform_in_fast_group(rank: Rank, calls: list[Call]) -> list[Any]:
    """Make calls in a group whose own promise is less; also what its node was asked for."""
    with rank.comm.new_group(numerics="fast") as group:
        issue, asked = group._node_group.issue, []

        def note(call: Any) -> Any:
            asked.append(getattr(call, "numerics", None))
            return issue(call)

        group._node_group.issue = note
        found = perform_all(dataclasses.replace(rank, comm=group), calls)
    assert "fast" not in asked
    assert rank.rank == 3 or "same_bits" in asked  # it is alone on its node
    return found


def test_a_call_may_ask_a_fast_group_for_the_same_bits(clusters: Clusters) -> None:
    calls = [
        Call(verb, "float32", numel, "SUM", numerics="same_bits", seed=numel)
        for verb in ("all_reduce", "reduce_scatter", "reduce")
        for numel in (1001, LARGE_SIZE)
    ]
    site = dataclasses.replace(across("aaab"), perform=perform_in_fast_group)
    site.on(clusters("aaab")).check(calls)


def subgroups(rank: Rank) -> list[str]:
    """Groups inside a node, across and mixed, and a group of a group."""
    kinds = []
    for ranks in ([0, 1], [0, 2], [0, 1, 2], [3, 1]):
        group = rank.comm.new_group(ranks)
        if not group.is_member:
            continue
        tensor = torch.full((60_000,), float(rank.rank))
        group.all_reduce(tensor)
        assert (tensor == sum(ranks)).all()
        kinds.append(type(group).__name__)
        if ranks == [0, 1, 2]:
            inner = group.new_group([0, 1])
            assert inner.world_size == (2 if inner.is_member else -1)
        group.close()
    return kinds


def test_subgroups_get_what_their_map_needs(clusters: Clusters) -> None:
    one, many = "Communicator", "HierarchicalCommunicator"
    found = clusters("aabb").run(subgroups)
    assert found == [[one, many, many], [one, many, many], [many, many], [many]]


def connections_to(port: int) -> int:
    mine = psutil.Process().net_connections("tcp")
    return sum(bool(one.raddr) and one.raddr.port == port for one in mine)


def more_groups(rank: Rank) -> tuple[int, int]:
    """How many connections to the store groups over nodes make; and one that makes its own."""
    store = rank.store.underlying_store
    before = connections_to(store.port)
    groups = [rank.comm.new_group() for _ in range(3)]
    several = connections_to(store.port) - before
    another = store.clone()
    control = connections_to(store.port) - before - several
    del another
    for group in groups:
        group.close()
    return several, control


def test_groups_over_nodes_share_a_connection_to_the_store(clusters: Clusters) -> None:
    assert clusters("aabb").run(more_groups) == [(0, 1)] * 4
