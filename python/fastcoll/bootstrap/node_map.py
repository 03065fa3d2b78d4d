# SPDX-License-Identifier: Apache-2.0
"""The map of a group: which ranks share memory, and which ranks connect across nodes.

Decides how nodes are ordered, and the lanes. Lane l joins one rank of every node, the one with
local rank l modulo the node's size. So each rank has a lane, and where nodes differ in size a rank
of a small one serves several. Pure: it must not know how the map was made.

All ranks of a node use the network at once. Any pair of nodes has one connection per lane, and
nodes of different sizes need no code of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class NodeMap:
    """Ranks by node; a node's ranks share memory."""

    # The ranks of each node, ascending; nodes are in the order of their lowest rank.
    nodes: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]  # the name of each node's host
    ids: tuple[str, ...]  # FASTCOLL_NODE_ID or the machine; equal where one has too many ranks

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Node and local rank of every rank."""
        return {
            rank: (node, local)
            for node, ranks in enumerate(self.nodes)
            for local, rank in enumerate(ranks)
        }

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @cached_property
    def num_lanes(self) -> int:
        """The size of the largest node."""
        return max(map(len, self.nodes))

    def slots(self, node: int) -> int:
        """Return how many lanes a rank of a node serves, at most."""
        return -(-self.num_lanes // len(self.nodes[node]))

    def lanes_of(self, node: int, local_rank: int) -> list[int]:
        """Return the lanes that a rank serves; the first is its own."""
        return list(range(local_rank, self.num_lanes, len(self.nodes[node])))

    def ranks_of(self, lane: int) -> list[int]:
        """Return the ranks that serve a lane, one of each node."""
        return [ranks[lane % len(ranks)] for ranks in self.nodes]

    def owners_of(self, lane: int) -> list[int | None]:
        """Return the rank whose own lane this is on each node, None where there is no such rank."""
        return [ranks[lane] if lane < len(ranks) else None for ranks in self.nodes]

    def describe(self, nodes: Sequence[int] | None = None) -> str:
        """Return some nodes, by default all, with their hosts and ranks."""
        chosen = range(self.num_nodes) if nodes is None else nodes
        return ", ".join(f"node {n} ({self.hosts[n]}): {_ranks(self.nodes[n])}" for n in chosen)


@dataclass(frozen=True)
class Seat:
    """One rank's place in a group over several nodes."""

    node_map: NodeMap
    rank: int
    nonce: str  # a text that no other group has, the same on all ranks
    store_rank: int | None = None  # the rank whose process serves the store, if one does


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
