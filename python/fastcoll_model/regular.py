# SPDX-License-Identifier: Apache-2.0
"""Schedules in which all ranks do the same, shifted: run one rank in place of all.

The ranks form a commutative group: shifting rank 0's steps by r gives rank r's. So every rank is at
the same point of its steps at the same time. The signal that rank 0 waits for from rank p comes
when rank 0 itself signals -p. A link of node 0 carries the bytes that rank 0's transfers, shifted
by every r, put on it. Ranks are numbered node by node, and shifts keep nodes together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fastcoll_model.errors import ModelError
from fastcoll_model.fabric import Fabric, Link, OneSwitch
from fastcoll_model.schedule import Schedule, Signal
from fastcoll_model.simulator import Simulation, Stream, Timing, simulate

# How the ranks of a schedule are shifted: added, or xor-ed where there are 2^k of them.
_ADDING = frozenset(
    (
        "one_shot",
        "two_shot",
        "direct",
        "ring",
        "bidirectional_ring",
        "pairwise",
        "bruck",
        "multimem",
    )
)
_XORING = frozenset(("recursive_doubling", "recursive_halving", "rabenseifner"))
ROOTLESS = frozenset(("all_reduce", "reduce_scatter", "all_gather", "all_to_all"))
"""The verbs in which ranks can be alike."""


@dataclass(frozen=True)
class Shifts:
    """The group: rank = node * local_size + local, shifted in each part by itself."""

    local_size: int
    num_nodes: int
    xor_nodes: bool = False

    def add(self, rank: int, other: int) -> int:
        """Return the rank shifted by another."""
        node, local = divmod(rank, self.local_size)
        by_node, by_local = divmod(other, self.local_size)
        node = node ^ by_node if self.xor_nodes else (node + by_node) % self.num_nodes
        return node * self.local_size + (local + by_local) % self.local_size

    def negative(self, rank: int) -> int:
        """Return the shift that undoes another."""
        node, local = divmod(rank, self.local_size)
        node = node if self.xor_nodes else -node % self.num_nodes
        return node * self.local_size + -local % self.local_size


def shifts_of(schedule: Schedule, local_size: int | None = None) -> Shifts | None:
    """Return how all ranks of a schedule do the same, or None if they don't.

    Args:
        schedule: From `builders`.
        local_size: Ranks per node of a hierarchical schedule, which is not regular without.
    """
    name, n = schedule.algorithm, schedule.world_size
    if schedule.verb not in ROOTLESS:
        return None
    is_power = n & (n - 1) == 0
    if name in _ADDING:
        return Shifts(1, n)
    if name in _XORING and is_power:
        return Shifts(1, n, xor_nodes=True)
    if local_size is None:
        return None
    num_nodes = n // local_size
    adding = ("hierarchical_ring", "hierarchical_direct")
    if name in adding or (name, schedule.verb) == ("hierarchical", "all_to_all"):
        return Shifts(local_size, num_nodes)
    if name == "hierarchical" and num_nodes & (num_nodes - 1) == 0:
        return Shifts(local_size, num_nodes, xor_nodes=True)
    return None


def simulate_regular(
    schedule: Schedule, fabric: Fabric, size_bytes: float, shifts: Shifts
) -> Timing:
    """Return how long a regular schedule takes; `link_bytes` are those of node 0.

    Raises:
        ModelError: The nodes of the fabric are not those of the shifts.
    """
    return _Regular(schedule, fabric, size_bytes, shifts).run()


def simulate_on_switch(schedule: Schedule, switch: OneSwitch, size_bytes: float) -> Timing:
    """Return how long a schedule takes where ranks are alike: by one of them if it is regular.

    Raises:
        ModelError: The schedule waits for ever.
    """
    shifts = shifts_of(schedule)
    if shifts is None:
        return simulate(schedule, switch, size_bytes)
    return simulate_regular(schedule, switch, size_bytes, shifts)


class _Regular(Simulation):
    def __init__(
        self, schedule: Schedule, fabric: Fabric, size_bytes: float, shifts: Shifts
    ) -> None:
        super().__init__(schedule, fabric, size_bytes)
        self.shifts = shifts
        self._refuse_unequal()

    def _refuse_unequal(self) -> None:
        """Refuse nodes of another size, and ranks whose ways differ from those of rank 0."""
        shifts, fabric = self.shifts, self.fabric
        size = shifts.local_size
        if fabric.node_of(size - 1) != 0 or (shifts.num_nodes > 1 and fabric.node_of(size) == 0):
            raise ModelError(
                f"the schedule has {size} ranks per node and the topology has not: "
                "only simulate() can run it there"
            )
        others = [*range(1, size), *([size] if shifts.num_nodes > 1 else [])]
        for other in others:
            for rank in range(1, size):
                there = shifts.add(other, rank)
                if self._way(0, other) != self._way(rank, there):
                    raise ModelError(
                        f"the way from rank {rank} to {there} is not like that from rank 0 to "
                        f"{other}: only simulate() can run the schedule there"
                    )

    def _way(self, source: int, destination: int) -> tuple[float, list[float]]:
        route = self.fabric.route(source, destination)
        return route.latency_us, [self.fabric.bytes_per_us(link) for link in route.links]

    def ranks(self) -> range:
        return range(1)

    @cached_property
    def first_node(self) -> range:
        return range(self.shifts.local_size)

    def wire(self, sender: Stream, signal: Signal) -> tuple[int, ...]:
        return (self.shifts.negative(signal.rank), sender.channel, 0, signal.channel)

    def usage(self, source: int, destination: int) -> Mapping[Link, float]:
        """Return the shares of node 0's links of the transfer and all its shifted twins."""
        if (source, destination) not in self.usages:
            add, negative = self.shifts.add, self.shifts.negative
            here = {
                add(rank, negative(end))
                for rank in self.first_node
                for end in (source, destination)
            }
            usage: dict[Link, float] = {}
            for shift in here:
                ends = (add(source, shift), add(destination, shift))
                for link in self.fabric.route(*ends).links:
                    if self.fabric.is_owned_by(link, 0):
                        usage[link] = usage.get(link, 0.0) + 1
                    elif not any(
                        self.fabric.is_owned_by(link, self.fabric.node_of(e)) for e in ends
                    ):
                        raise ModelError(f"{link} belongs to no node: see Cluster.under_one_leaf")
            self.usages[source, destination] = usage
        return self.usages[source, destination]

    def multicast_usage(self, rank: int, *, reads: bool) -> Mapping[Link, float]:
        up, down = self.fabric.multicast_ports(rank)
        everyone = float(self.schedule.world_size)
        return {up: everyone, down: 1.0} if reads else {up: 1.0, down: everyone}
