# SPDX-License-Identifier: Apache-2.0
"""Which algorithm for a collective on a topology, and why: all candidates, priced or refused.

Decides which algorithms are admitted on paper. A reduction with numerics="same_bits" must add in
rank order. Over several nodes it must add the sums of the nodes in the order of the nodes. The
checker proves that order on a schedule of a few ranks; there is no list of such algorithms.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Literal

from fastcoll_model.builders import algorithms_of, build, chain_of_sockets
from fastcoll_model.builders.hierarchical import BETWEEN
from fastcoll_model.builders.sockets import NAME as SOCKET_CHAIN
from fastcoll_model.checker import check
from fastcoll_model.errors import ModelError
from fastcoll_model.fabric import on_one_switch
from fastcoll_model.limits import least_us
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.machines.sockets import sockets_of
from fastcoll_model.regular import ROOTLESS, shifts_of, simulate_on_switch, simulate_regular
from fastcoll_model.schedule import REDUCTIONS, VERBS, Copy, Reduce, Schedule, moved
from fastcoll_model.simulator import simulate
from fastcoll_model.values import node_by_node

_SEGMENTS = {
    **dict.fromkeys(("chain", "double_binary_tree", "multimem"), (1, 4, 16, 64)),
    SOCKET_CHAIN: (1, 8),  # more gain a tenth, and take long to simulate
}
# Four nodes of three: by two, trees and doubling would seem to add node by node.
_PROOF_RANKS, _PROOF_LOCAL = 12, 3
_MAX_TRANSFERS = 40_000  # of all ranks: some seconds
_MAX_RANKS = 256
_MAX_RANKS_OF_A_ROOT = 1024  # where no rank can stand for all


@dataclass(frozen=True)
class Candidate:
    """One algorithm.

    Attributes:
        time_us: Simulated; None if it was refused.
        reason: Why it was refused, or "".
        num_segments: The best of those tried, for algorithms that pipeline.
    """

    algorithm: str
    time_us: float | None
    reason: str = ""
    num_segments: int = 1


@dataclass(frozen=True)
class Comparison:
    """All candidates, fastest first, then those refused; and the lower bound of any algorithm."""

    verb: str
    world_size: int
    size_bytes: int
    candidates: list[Candidate]
    least_us: float

    @property
    def best(self) -> Candidate:
        """The fastest."""
        return self.candidates[0]


@cache
def adds_in_order(verb: str, algorithm: str, local_size: int = _PROOF_RANKS) -> bool:
    """Return whether an algorithm adds in rank order on each node and then in that of the nodes.

    As proven for 12 ranks.

    Args:
        verb: A reduction.
        algorithm: One of `algorithms_of(verb)`.
        local_size: Ranks per node, which divide 12; all of them: rank order.
    """
    proof = check(build(verb, algorithm, _PROOF_RANKS, local_size=local_size))
    return set(proof.orders.values()) == {node_by_node(_PROOF_RANKS // local_size, local_size)}


def price_us(schedule: Schedule, cluster: Cluster, size_bytes: float) -> float:
    """Return the simulated time: by one rank in place of all if they are alike, or step by step.

    Where ranks are alike on one switch, both give the same time. Between nodes one rank stands for
    all only with simplifications, so only schedules too long to simulate are priced that way.

    Raises:
        ModelError: It is too long, and the ranks are not all alike.
    """
    switch = on_one_switch(cluster, schedule.world_size)
    if switch and shifts_of(schedule):
        return simulate_on_switch(schedule, switch, size_bytes).time_us
    max_ranks = _MAX_RANKS if schedule.verb in ROOTLESS else _MAX_RANKS_OF_A_ROOT
    if schedule.world_size <= max_ranks and _has_few_transfers(schedule):
        return simulate(schedule, cluster, size_bytes).time_us
    shifts = shifts_of(schedule, cluster.local_size)
    if shifts is None:
        raise ModelError(f"not priced: too many steps for {schedule.world_size} ranks")
    if shifts.local_size != cluster.local_size:
        raise ModelError(
            f"not priced: too many steps for {schedule.world_size} ranks, some of whose neighbours "
            "are on other nodes"
        )
    return simulate_regular(schedule, cluster.under_one_leaf(), size_bytes, shifts).time_us


def _has_few_transfers(schedule: Schedule) -> bool:
    programs = (
        schedule.program(rank, channel)
        for rank in range(schedule.world_size)
        for channel in range(schedule.num_channels)
    )
    moves = (len(moved(s)) for steps in programs for s in steps if isinstance(s, Copy | Reduce))
    return all(total <= _MAX_TRANSFERS for total in accumulate(moves))


def compare(
    verb: str,
    cluster: Cluster,
    world_size: int,
    size_bytes: int,
    numerics: Literal["same_bits", "fast"] = "same_bits",
) -> Comparison:
    """Price every algorithm of a verb on a topology.

    Args:
        verb: One of `schedule.VERBS`.
        cluster: The topology.
        world_size: Ranks that take part: the first ones; whole nodes if there are several.
        size_bytes: The larger of a rank's input and output.
        numerics: "same_bits" refuses reductions in any but rank order, over nodes node by node.

    Raises:
        ModelError: The ranks don't fit the topology.
    """
    if verb not in VERBS:
        raise ModelError(f"no verb {verb!r}; the verbs are {', '.join(VERBS)}")
    local_size = min(cluster.local_size, world_size)
    if world_size > cluster.num_ranks or world_size % local_size:
        raise ModelError(
            f"{world_size} ranks don't fill whole nodes of {cluster.local_size} on "
            f"{cluster.num_nodes} x {cluster.machine.name}"
        )
    candidates = []
    for algorithm in algorithms_of(verb):
        reason = _refusal(verb, algorithm, cluster, world_size, numerics)
        if reason:
            candidates.append(Candidate(algorithm, None, reason))
            continue
        candidates.append(priced(verb, algorithm, cluster, world_size, size_bytes))
    candidates.sort(key=lambda c: (c.time_us is None, c.time_us or 0.0))
    if candidates[0].time_us is None:
        more = '; numerics="fast" admits more of them' if numerics == "same_bits" else ""
        reasons = [c.reason for c in candidates]
        reason = next((r for r in reasons if r.startswith("not priced")), reasons[0])
        raise ModelError(f"no algorithm of {verb} could be priced: {reason}{more}")
    least = least_us(verb, cluster, world_size, size_bytes)
    return Comparison(verb, world_size, size_bytes, candidates, least)


def _refusal(verb: str, algorithm: str, cluster: Cluster, world_size: int, numerics: str) -> str:
    one_node = world_size <= cluster.local_size
    if algorithm in BETWEEN and one_node:
        return "there is one node only"
    if algorithm == SOCKET_CHAIN and len(set(_sockets(cluster, world_size))) < 2:
        return "there is one socket only" if one_node else "it goes over sockets, not over nodes"
    if verb in REDUCTIONS and numerics == "same_bits":
        local_size = _PROOF_RANKS if one_node else _PROOF_LOCAL if cluster.local_size > 1 else 1
        if not adds_in_order(verb, algorithm, local_size):
            order = "in rank order" if one_node else "node by node"
            return f'does not add {order}, as numerics="same_bits" asks for'
    if algorithm == "multimem" and (not cluster.machine.multicast or cluster.num_nodes > 1):
        return "no switch adds and multicasts for all ranks"
    return ""


def _sockets(cluster: Cluster, world_size: int) -> list[int]:
    """Return the sockets of the cores that the ranks run on; none: they span nodes, or are GPUs."""
    of_cores = not cluster.machine.ranks[0].startswith("gpu")
    if not of_cores or world_size > cluster.local_size:
        return []
    return sockets_of(cluster.machine)[:world_size]


@lru_cache(maxsize=1024)  # a report asks for the same several times
def priced(
    verb: str, algorithm: str, cluster: Cluster, world_size: int, size_bytes: int
) -> Candidate:
    """Return one algorithm with its simulated time, or why it has none; see `compare`."""
    local_size = min(cluster.local_size, world_size)
    times = []
    for num_segments in _SEGMENTS.get(algorithm, (1,)):
        if algorithm == SOCKET_CHAIN:
            schedule = chain_of_sockets(_sockets(cluster, world_size), num_segments)
        else:
            schedule = build(
                verb, algorithm, world_size, num_segments=num_segments, local_size=local_size
            )
        try:
            times.append((price_us(schedule, cluster, size_bytes), num_segments))
        except ModelError as error:
            if not times:
                return Candidate(algorithm, None, str(error))
        if times[-1] > min(times):
            break  # the more segments, the more signals: it only gets worse
    time_us, num_segments = min(times)
    return Candidate(algorithm, time_us, num_segments=num_segments)
