# SPDX-License-Identifier: Apache-2.0
"""The places of ranks: rings over the best links of a machine, and the cost of a mapping.

Decides the order of ranks; finds rings exactly, for machines of up to some sixteen ranks.
"""

from collections.abc import Mapping

from fastcoll_model.errors import ModelError
from fastcoll_model.groups import consecutive, groups_us, strided
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.machines.machine import Machine

MAX_RANKS = 16

Capacities = dict[tuple[str, str], float]


def direct_gbps(machine: Machine) -> Capacities:
    """Return the bandwidth between ranks that a wire joins, one direction each."""
    ranks = set(machine.ranks)
    return {
        (one, other): wire.gbps
        for (one, other), wire in machine.wires.items()
        if one in ranks and other in ranks
    }


def best_ring(machine: Machine) -> tuple[list[str], float]:
    """Return the ring whose slowest hop is fastest, and that hop's 10^9 bytes a second.

    Raises:
        ModelError: There are more ranks than an exact search takes.
    """
    ranks = machine.ranks
    if len(ranks) > MAX_RANKS:
        raise ModelError(f"{machine.name} has {len(ranks)} ranks; rings are found for {MAX_RANKS}")
    if len(ranks) < 2:
        return list(ranks), float("inf")
    hops = {(a, b): machine.bottleneck(a, b).gbps for a in ranks for b in ranks if a != b}
    for floor in sorted(set(hops.values()), reverse=True):
        ring = _ring({hop: gbps for hop, gbps in hops.items() if gbps >= floor}, ranks)
        if ring:
            return ring, floor
    raise ModelError(f"{machine.name} has no ring")


def disjoint_rings(machine: Machine) -> list[tuple[list[str], float]]:
    """Return rings over direct wires that share no bandwidth, the widest first, with their GB/s.

    Greedy: the widest ring is taken out as often as it fits, then the next. On a DGX-1V these are
    the rings that NCCL is known to use: one over the double links, one over the single ones.

    Raises:
        ModelError: There are more ranks than an exact search takes.
    """
    if len(machine.ranks) > MAX_RANKS:
        raise ModelError(
            f"{machine.name} has {len(machine.ranks)} ranks; rings are found for {MAX_RANKS}"
        )
    left = direct_gbps(machine)
    found: list[tuple[list[str], float]] = []
    while True:
        for floor in sorted({gbps for gbps in left.values() if gbps > 0}, reverse=True):
            usable = {hop: gbps for hop, gbps in left.items() if gbps >= floor}
            ring = _ring(usable, machine.ranks)
            if ring:
                break
        else:
            return found
        found.append((ring, floor))
        for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
            left[one, other] -= floor
            left[other, one] -= floor  # the way back is another ring's, in the other direction


def _ring(hops: Mapping[tuple[str, str], float], ranks: tuple[str, ...]) -> list[str]:
    """Return a ring over all ranks that uses only the hops, or nothing."""
    path, seen = [ranks[0]], {ranks[0]}

    def extend() -> bool:
        if len(path) == len(ranks):
            return (path[-1], path[0]) in hops
        for rank in ranks:
            if rank not in seen and (path[-1], rank) in hops:
                path.append(rank)
                seen.add(rank)
                if extend():
                    return True
                seen.discard(path.pop())
        return False

    return path if extend() else []


def mapping_us(
    verb: str, cluster: Cluster, group_size: int, size_bytes: float
) -> tuple[float, float]:
    """Return the time of a collective in groups of neighbours, and in groups dealt out far apart.

    Tensor-parallel groups belong on neighbours: this is the price of a careless mapping.
    """
    near = consecutive(cluster.num_ranks, group_size)
    far = strided(cluster.num_ranks, group_size)
    return (
        groups_us(verb, cluster, near, size_bytes),
        groups_us(verb, cluster, far, size_bytes),
    )
