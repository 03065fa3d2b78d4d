# SPDX-License-Identifier: Apache-2.0
"""The best that libraries can reach on a topology, by the algorithms that each one has.

Decides which algorithms those are, in the names of `builders`, and the cost of a call on top. Wires
are the topology's for all of them: a library that does not reach their bandwidth (Gloo goes through
sockets) takes longer. Libraries choose by their own rules, so their measured times may be longer
than the times here.

Sources:
    NCCL: its user guide, NCCL_ALGO (Ring, Tree, NVLS); sends and receives for the verbs that only
        exchange.
    Gloo: its docs/algorithms.md.
    MPI: Thakur, Rabenseifner and Gropp 2005 (MPICH; Open MPI's are the same or more).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fastcoll_model.explain import Comparison
from fastcoll_model.machines.cluster import Cluster

_BETWEEN = ("hierarchical", "hierarchical_ring")
_ORDERED = "hierarchical_direct"
_MOVING = ("all_gather", "broadcast", "gather", "scatter", "all_to_all")


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        devices: Whose memory it works on.
        algorithms: By verb; a verb that is missing is none of its own.
        orders: Whether it adds in rank order on request.
        over_nodes: Those of `algorithms` that it has over several nodes, None: all.
        call_us: Cost of a call on top of its transfers, None if it is not known.
        source: Where `call_us` is from.
    """

    name: str
    devices: tuple[Literal["cpu", "gpu"], ...]
    algorithms: Mapping[str, tuple[str, ...]]
    orders: bool
    call_us: Mapping[str, float]
    source: str
    over_nodes: tuple[str, ...] | None = None


LIBRARIES = (
    Library(
        "fastcoll",
        ("cpu", "gpu"),
        {
            "all_reduce": ("one_shot", "two_shot", "ring", "chain", *_BETWEEN, _ORDERED),
            "reduce_scatter": ("one_shot", "ring", *_BETWEEN, _ORDERED),
            "reduce": ("one_shot", "hierarchical", _ORDERED),
            **dict.fromkeys(_MOVING, ("direct", "hierarchical")),
        },
        orders=True,
        call_us={"cpu": 0.0},
        source="8 bytes take 0.2 us between 2 CPUs, no more than the wires do; no GPU measured yet",
        over_nodes=(*_BETWEEN, _ORDERED),
    ),
    Library(
        "NCCL",
        ("gpu",),
        {
            "all_reduce": ("ring", "double_binary_tree", "multimem", *_BETWEEN),
            "reduce_scatter": ("ring", "multimem", *_BETWEEN),
            "all_gather": ("ring", "multimem", *_BETWEEN),
            "broadcast": ("chain",),
            "reduce": ("chain",),
            "gather": ("direct",),
            "scatter": ("direct",),
            "all_to_all": ("direct", "pairwise"),
        },
        orders=False,
        call_us={"gpu": 14.6},
        source="8 x H200, 2 KiB: 16.6 us published (flashinfer#3759), 2.0 of them on the wires",
    ),
    Library(
        "Gloo",
        ("cpu",),
        {
            "all_reduce": ("ring", "rabenseifner"),
            "reduce_scatter": ("ring", "recursive_halving"),
            "all_gather": ("ring",),
            "broadcast": ("tree",),
            "reduce": ("tree",),
            "gather": ("direct",),
            "scatter": ("direct",),
            "all_to_all": ("pairwise",),
        },
        orders=False,
        call_us={"cpu": 354.0},
        source="8 bytes between 2 CPUs, bench/results/epyc-zen4-2core/python-float32.json",
    ),
    Library(
        "MPI",
        ("cpu", "gpu"),
        {
            "all_reduce": ("recursive_doubling", "rabenseifner", "ring"),
            "reduce_scatter": ("recursive_halving", "pairwise"),
            "all_gather": ("recursive_doubling", "bruck", "ring"),
            "broadcast": ("tree", "scatter_all_gather"),
            "reduce": ("tree", "rabenseifner"),
            "gather": ("tree",),
            "scatter": ("tree",),
            "all_to_all": ("bruck", "pairwise"),
        },
        orders=False,
        call_us={"cpu": 0.2},
        source="Open MPI, 8 bytes between 2 CPUs, bench/results/epyc-zen4-2core/c-float32.json: "
        "0.4 us, half of it on the wires",
    ),
)


@dataclass(frozen=True)
class Offer:
    """The best that one library can reach.

    Attributes:
        algorithm: The best of its own, or "".
        wires_us: Simulated time of its transfers; None if it can't do the call.
        call_us: Measured cost of a call on top; None if it was not measured.
        remark: Why it can't, or the source of `call_us`.
    """

    library: str
    algorithm: str
    wires_us: float | None
    call_us: float | None
    remark: str


def offers(found: Comparison, fast: Comparison, cluster: Cluster) -> list[Offer]:
    """Return the best of every library, in no order: sums with and without a call don't compare.

    Args:
        found: The comparison that was asked for.
        fast: The same with numerics="fast", for libraries that have an order of their own.
        cluster: Where.
    """
    same = found != fast
    made = [
        _offer(
            library, found if library.orders else fast, cluster, tells=same and not library.orders
        )
        for library in LIBRARIES
    ]
    return sorted(made, key=lambda one: one.wires_us is None)


def _offer(library: Library, found: Comparison, cluster: Cluster, *, tells: bool) -> Offer:
    device = "gpu" if cluster.machine.ranks[0].startswith("gpu") else "cpu"
    if device not in library.devices:
        text = f"works on {' and '.join(library.devices)} tensors"
        return Offer(library.name, "", None, None, text)
    names = library.algorithms[found.verb]
    if library.over_nodes is not None and found.world_size > cluster.local_size:
        names = tuple(name for name in names if name in library.over_nodes)
    able = [c for c in found.candidates if c.algorithm in names and c.time_us is not None]
    if not able:
        text = f"none of {', '.join(names)} could be priced"
        return Offer(library.name, "", None, None, text)
    best = min(able, key=lambda one: one.time_us or 0.0)
    call_us = library.call_us.get(device)
    remarks = [library.source if call_us else "", "adds in an order of its own" if tells else ""]
    text = "; ".join(filter(None, remarks))
    return Offer(library.name, best.algorithm, best.time_us, call_us, text)
