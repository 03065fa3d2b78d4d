# SPDX-License-Identifier: Apache-2.0
"""Equal machines on one network, as the simulator sees them (`fastcoll_model.fabric.Fabric`)."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from fastcoll_model.errors import ModelError
from fastcoll_model.machines.machine import Machine, Network, cards_of


class Port(NamedTuple):
    """One direction of a wire, between devices of a node, card and leaf, or leaf and spine."""

    owner: int
    source: str
    target: str


class Route(NamedTuple):
    """The links from one rank to another, and the time until a signal is there."""

    links: tuple[Hashable, ...]
    latency_us: float


_LEAF = -1  # owner of a leaf's ports: no node


@dataclass(frozen=True, eq=False)
class Cluster:
    """`num_nodes` machines; rank i runs on device i mod m of node i div m. Equal to itself only.

    Raises:
        ModelError: Several nodes without a network, or without network cards.
    """

    machine: Machine
    num_nodes: int = 1
    network: Network | None = None
    _known: dict[tuple[int, int], Route] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ModelError(f"{self.num_nodes} nodes: there must be one at least")
        if self.num_nodes == 1:
            return
        if self.network is None:
            raise ModelError(f"{self.num_nodes} nodes need a network between them")
        without = [rank for rank in self.machine.ranks if rank not in self.machine.nics]
        if without:
            raise ModelError(f"{self.machine.name}: {without[0]!r} has no network card: see nics")

    @property
    def local_size(self) -> int:
        """Ranks per node."""
        return len(self.machine.ranks)

    @property
    def num_ranks(self) -> int:
        """Ranks that there is place for."""
        return self.num_nodes * self.local_size

    @property
    def reduce_us_per_byte(self) -> float:
        """Time to add one byte to another."""
        return 1e-3 / self.machine.reduce_gbps

    @property
    def copy_us_per_byte(self) -> float:
        """Time to copy one byte within a rank."""
        return 1e-3 / self.machine.copy_gbps

    @cached_property
    def _cards(self) -> list[str]:
        return list(cards_of(self.machine))

    def under_one_leaf(self) -> "Cluster":
        """Return the cluster with every way between nodes as long as the longest.

        For the simulation of one rank in place of all, which needs all nodes to be alike.

        Raises:
            ModelError: The spine is oversubscribed, so where a node stands matters.
        """
        network = self.network
        if network is None:
            return self
        if self.num_nodes > network.nodes_per_leaf and network.oversubscription > 1:
            raise ModelError(
                f"{network.name} has {network.oversubscription:g} times less bandwidth above the "
                "leaves than below: its nodes are not alike"
            )
        several = self.num_nodes > network.nodes_per_leaf
        longest_us = network.latency_us + network.spine_latency_us * several
        level = replace(network, latency_us=longest_us, nodes_per_leaf=self.num_nodes, rails=False)
        return Cluster(self.machine, self.num_nodes, level)

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.local_size

    def is_owned_by(self, link: object, node: int) -> bool:
        """Return whether a link is the node's own."""
        return isinstance(link, Port) and link.owner == node

    def route(self, source: int, destination: int) -> Route:
        """Return the way between two ranks that differ."""
        key = (source, destination)
        if key not in self._known:
            same_node = self.node_of(source) == self.node_of(destination)
            self._known[key] = self._inside(*key) if same_node else self._between(*key)
        return self._known[key]

    def bytes_per_us(self, link: object) -> float:
        """Return the bandwidth of a link."""
        assert isinstance(link, Port)
        if link.owner != _LEAF:
            wire = self.machine.wires.get((link.source, link.target))
            if wire is not None:
                return wire.gbps * 1e3
        assert self.network is not None
        below = self.network.gbps * 1e3
        if link.owner != _LEAF:
            return below
        cards = 1 if self.network.rails else len(self._cards)
        return below * cards * self.network.nodes_per_leaf / self.network.oversubscription

    def multicast_ports(self, rank: int) -> tuple[Port, Port]:
        """Return the rank's (up, down) links to the switch that adds and multicasts.

        Raises:
            ModelError: There is none.
        """
        switch = self.machine.multicast
        if not switch or self.num_nodes > 1:
            raise ModelError(f"{self.machine.name}: no switch adds and multicasts for all ranks")
        device = self.machine.ranks[rank]
        return Port(0, device, switch), Port(0, switch, device)

    def _hops(self, node: int, source: str, destination: str) -> tuple[list[Port], float]:
        way = self.machine.way(source, destination)
        hops = list(pairwise(way))
        latency_us = sum(self.machine.wires[hop].latency_us for hop in hops)
        return [Port(node, *hop) for hop in hops], latency_us

    def _inside(self, source: int, destination: int) -> Route:
        node, start = divmod(source, self.local_size)
        ranks = self.machine.ranks
        hops, latency_us = self._hops(node, ranks[start], ranks[destination % self.local_size])
        return Route(tuple(hops), latency_us)

    def _between(self, source: int, destination: int) -> Route:
        network = self.network
        assert network is not None
        ends = []
        for rank in (source, destination):
            node, local = divmod(rank, self.local_size)
            device = self.machine.ranks[local]
            card = self.machine.nics[device]
            rail = self._cards.index(card) if network.rails else 0
            ends.append((node, device, card, f"leaf{rail}.{node // network.nodes_per_leaf}"))
        (node, device, card, leaf), (to_node, to_device, to_card, to_leaf) = ends
        out, out_us = self._hops(node, device, card)
        back, back_us = self._hops(to_node, to_card, to_device)
        links = [*out, Port(node, card, "leaf")]
        latency_us = out_us + network.latency_us + back_us
        if leaf != to_leaf:
            links += [Port(_LEAF, leaf, "spine"), Port(_LEAF, "spine", to_leaf)]
            latency_us += network.spine_latency_us
        return Route((*links, Port(to_node, "leaf", to_card), *back), latency_us)
