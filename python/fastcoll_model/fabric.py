# SPDX-License-Identifier: Apache-2.0
"""The interface of a network to the simulator, and the simplest network: one switch."""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import permutations
from typing import Protocol

from fastcoll_model.machines.cluster import Route

Link = Hashable
"""One direction of a wire."""


class Fabric(Protocol):
    """Ranks and the links between them."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that there is place for."""

    @property
    def reduce_us_per_byte(self) -> float:
        """Time to add one byte to another, where both are at hand."""

    @property
    def copy_us_per_byte(self) -> float:
        """Time to copy one byte within a rank."""

    def route(self, source: int, destination: int, /) -> Route:
        """Return the way of data and signals between two ranks that differ."""

    def bytes_per_us(self, link: Link, /) -> float:
        """Return the bandwidth of a link."""

    def multicast_ports(self, rank: int, /) -> tuple[Link, Link]:
        """Return the rank's (up, down) links to the switch that reduces and multicasts.

        Raises:
            ModelError: There is no such switch.
        """

    def node_of(self, rank: int, /) -> int:
        """Return the node that holds the rank; nodes are filled one after the other."""

    def is_owned_by(self, link: Link, node: int, /) -> bool:
        """Return whether the link belongs to the node."""


@dataclass(frozen=True)
class OneSwitch:
    """Hockney's machine: full-duplex ports on one switch that is never the bottleneck.

    A message of m bytes takes alpha + m beta. A rank sends one message's worth and receives one at
    the same time. Adding m bytes takes m gamma. (Hockney 1994; Thakur, Rabenseifner and Gropp 2005,
    section 3.)
    """

    num_ranks: int
    alpha_us: float
    beta_us_per_byte: float
    gamma_us_per_byte: float = 0.0
    copy_us_per_byte: float = 0.0  # local copies are free in the books

    @property
    def reduce_us_per_byte(self) -> float:
        """Gamma."""
        return self.gamma_us_per_byte

    def route(self, source: int, destination: int) -> Route:
        """Return the way up to the switch and down again."""
        return Route(((source, "up"), (destination, "down")), self.alpha_us)

    def bytes_per_us(self, link: Link) -> float:
        """Return 1 / beta."""
        del link
        return 1 / self.beta_us_per_byte

    def multicast_ports(self, rank: int) -> tuple[Link, Link]:
        """Return the rank's port."""
        return (rank, "up"), (rank, "down")

    def node_of(self, rank: int) -> int:
        """Every rank is a node of its own."""
        return rank

    def is_owned_by(self, link: Link, node: int) -> bool:
        """Return whether it is the node's port."""
        return isinstance(link, tuple) and link[0] == node


def on_one_switch(fabric: Fabric, num_ranks: int) -> OneSwitch | None:
    """Return the first ranks of a fabric as ports of one switch, None if they are not all alike.

    Each rank must have one link up and one down, none shared with another rank. All links have the
    same bandwidth, and any two ranks are equally far apart.
    """
    if num_ranks < 2:
        return None
    first = fabric.route(0, 1)
    ups: dict[int, Link] = {}
    downs: dict[int, Link] = {}
    for source, destination in permutations(range(num_ranks), 2):
        links, latency_us = fabric.route(source, destination)
        if len(links) != 2 or latency_us != first.latency_us:
            return None
        if (ups.setdefault(source, links[0]), downs.setdefault(destination, links[1])) != links:
            return None
    ports = {*ups.values(), *downs.values()}
    speeds = {fabric.bytes_per_us(port) for port in ports}
    if len(ports) < 2 * num_ranks or len(speeds) > 1:
        return None
    return OneSwitch(
        num_ranks,
        first.latency_us,
        1 / speeds.pop(),
        fabric.reduce_us_per_byte,
        fabric.copy_us_per_byte,
    )
