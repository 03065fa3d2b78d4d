# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of any algorithm on a topology: bytes that must cross a rank's or node's boundary.

The counts are those of Patarasuk and Yuan 2009 (all_reduce, applied to ranks and to whole nodes)
and Chan et al. 2007 (the others). A switch that adds (multimem) needs only half of an all_reduce's
bytes each way. Bandwidth of a rank: all its wires but the one to the network; of a node: all its
cards. To this comes one latency, the shortest there is.
"""

from fastcoll_model.machines.cluster import Cluster


def _bytes_in(verb: str, size_bytes: float, parts: int) -> float:
    """Return the least that the busiest of `parts` equal groups of ranks takes in, or gives."""
    share = (parts - 1) / parts
    if verb in ("broadcast", "reduce"):
        return size_bytes * (parts > 1)
    if verb == "all_reduce":
        return 2 * share * size_bytes
    return share * size_bytes


def least_us(verb: str, cluster: Cluster, world_size: int, size_bytes: float) -> float:
    """Return a time that no algorithm can beat.

    Args:
        verb: One of `schedule.VERBS`.
        cluster: Where it runs.
        world_size: Ranks that take part: the first ones.
        size_bytes: The larger of a rank's input and output.
    """
    if world_size == 1:
        return 0.0
    machine = cluster.machine
    num_nodes = -(-world_size // cluster.local_size)
    nearest_us = min(cluster.route(0, rank).latency_us for rank in range(1, world_size))
    rank_gbps = max(
        sum(
            wire.gbps
            for (one, other), wire in machine.wires.items()
            if one == rank and other not in machine.nics.values()
        )
        for rank in machine.ranks
    )
    adds = bool(machine.multicast) and verb == "all_reduce" and num_nodes == 1
    rank_bytes = size_bytes if adds else _bytes_in(verb, size_bytes, world_size)
    times_us = [rank_bytes / rank_gbps / 1e3]
    if num_nodes > 1 and cluster.network is not None:
        node_gbps = cluster.network.gbps * len(set(machine.nics.values()))
        # A node sends the all_to_all messages of all its ranks.
        ranks = cluster.local_size if verb == "all_to_all" else 1
        times_us.append(ranks * _bytes_in(verb, size_bytes, num_nodes) / node_gbps / 1e3)
    return nearest_us + max(times_us)
