# SPDX-License-Identifier: Apache-2.0
"""From the parts of this machine to a machine of the model, in the words of its file.

Decides the bandwidth and latency of the wires, with the source of every number: the hardware, or
an assumption where the hardware does not tell. A machine of its GPUs if there are any, else of its
cores.
"""

from collections.abc import Iterable
from itertools import combinations
from typing import Any

from fastcoll_model.machines.local import Core, Local, LocalGpu, Nic

Json = dict[str, Any]

_CORE = {"kind": "core to shared cache", "gbps": 20, "latency_us": 0.08}
_CORE_SOURCE = (
    "an assumption: as between 2 cores of one Xeon (fastcoll/choose/algorithms/shared.py)"
)
_NEAR, _LOCAL = 20, 10  # the kernel's distances: next node, own node
# Of one link, each way; 80 % of the data sheet's arrives.
_NVLINK_GBPS = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
_USABLE = 0.8


def describe(found: Local, name: str = "here") -> Json:
    """Return the machine as a file of the topology model says it (topology.schema.json)."""
    return _of_gpus(found, name) if found.gpus else _of_cores(found, name)


def _links(between: Iterable[tuple[str, str]], wire: Json, source: str) -> Json:
    return {"between": [list(pair) for pair in between], **wire, "source": source}


def _document(name: str, title: str, ranks: list[str], links: list[Json], **more: Any) -> Json:
    kept = [group for group in links if group["between"]]
    head = {"format": 1, "kind": "machine", "name": name, "title": title, "ranks": ranks}
    return {**head, "links": kept, **{key: value for key, value in more.items() if value}}


# ---- cores -------------------------------------------------------------------------------------


def _of_cores(found: Local, name: str) -> Json:
    cores = found.cores or (Core(0, (0,), 0, 0, "", ""),)
    caches = {_cache_of(core): f"cache{i}" for i, core in enumerate(_first_of(cores))}
    ranks = [f"core{core.cpu}" for core in cores]
    nodes = sorted({core.node for core in cores} | {nic.node for nic in found.nics})
    links = [
        _links(
            [(f"core{core.cpu}", caches[_cache_of(core)]) for core in cores], _CORE, _CORE_SOURCE
        ),
        _links(
            [(caches[_cache_of(core)], f"node{core.node}") for core in _first_of(cores)],
            {"kind": "cache to memory of the node", "gbps": 40, "latency_us": 0.05},
            "an assumption",
        ),
        *_between_nodes(nodes, found),
        *_to_nics(found.nics, nodes),
    ]
    size = cores[0].cache_size
    title = f"{len(cores)} cores in {len(nodes)} NUMA nodes, {len(caches)} caches" + (
        f" of {size}" if size else ""
    )
    return _document(
        name,
        title,
        ranks,
        links,
        nics=_nearest({rank: core.node for rank, core in zip(ranks, cores, strict=True)}, found),
        reduce_gbps=30,
        copy_gbps=50,
        memory_gb=max(0.001, round(found.memory_bytes / 1e9 / len(cores), 3)),
        source="cores, caches, nodes and cards: sysfs; rates: as in cpu-2s, an assumption; measure "
        "them with `fastcoll tune`",
    )


def _cache_of(core: Core) -> tuple[str, int, int]:
    """Return the common part of two cores that share their last cache."""
    return core.cache, core.socket, core.node


def _first_of(cores: Iterable[Core]) -> list[Core]:
    """Return one core for each last cache."""
    return list({_cache_of(core): core for core in cores}.values())


def _between_nodes(nodes: list[int], found: Local) -> list[Json]:
    """Return a wire between all pairs of nodes: the farther, the slower."""
    return [
        _links(
            [(f"node{one}", f"node{other}")],
            {
                "kind": "node to node",
                "gbps": round(60 * _NEAR / max(far, _LOCAL), 1),
                "latency_us": round(0.2 * max(far, _LOCAL) / _NEAR, 3),
            },
            f"an assumption: 60 GB/s and 0.2 us at distance {_NEAR}; the kernel says {far}",
        )
        for one, other in combinations(nodes, 2)
        for far in (found.node_distances.get((one, other), _NEAR),)
    ]


def _to_nics(nics: Iterable[Nic], nodes: list[int]) -> list[Json]:
    return [
        _links(
            [(nic.name, f"node{nic.node}")],
            {"kind": nic.kind, "gbps": round(nic.gbps, 3), "latency_us": 0},
            f"sysfs: {8 * nic.gbps:g} Gbit/s",
        )
        for nic in nics
        if nic.gbps > 0 and nic.node in nodes
    ]


def _nearest(node_of: dict[str, int], found: Local) -> dict[str, str]:
    """Return for each rank a card with a link, of its own node if that has one; shared evenly."""
    usable = [nic for nic in found.nics if nic.gbps > 0]
    chosen, users = {}, {nic.name: 0 for nic in usable}
    for rank, node in node_of.items():
        if usable:
            best = min(usable, key=lambda nic: (nic.node != node, users[nic.name]))
            chosen[rank] = best.name
            users[best.name] += 1
    return chosen


# ---- GPUs --------------------------------------------------------------------------------------


def _of_gpus(found: Local, name: str) -> Json:
    gpus = found.gpus
    ranks = [f"gpu{gpu.index}" for gpu in gpus]
    nodes = sorted({gpu.node for gpu in gpus} | {nic.node for nic in found.nics})
    has_switch = all(gpu.nvlinks.get("nvswitch") for gpu in gpus)
    links = [*_nvlinks(gpus), *_slots(gpus), *_between_nodes(nodes, found)]
    first = gpus[0]
    rates = {True: (2400, 1200), False: (600, 300)}[first.capability >= 90]
    return _document(
        name,
        f"{len(gpus)} x {first.name}",
        ranks,
        [*links, *_to_nics(found.nics, nodes)],
        nics=_nearest({f"gpu{gpu.index}": gpu.node for gpu in gpus}, found),
        multicast="nvswitch" if has_switch and first.capability >= 90 else "",
        reduce_gbps=rates[1],
        copy_gbps=rates[0],
        memory_gb=max(0.001, round(first.memory_bytes / 1e9, 3)),
        source="GPUs, NVLinks and slots: NVML; nodes and cards: sysfs; copy, reduce: assumptions",
    )


def _nvlinks(gpus: Iterable[LocalGpu]) -> list[Json]:
    groups: dict[tuple[int, int], set[tuple[str, str]]] = {}
    for gpu in gpus:
        for there, count in gpu.nvlinks.items():
            first, second = sorted((f"gpu{gpu.index}", there))
            groups.setdefault((gpu.nvlink_version, count), set()).add((first, second))
    seen: set[tuple[str, str]] = set()
    links = []
    for (version, count), pairs in groups.items():
        gbps = count * _NVLINK_GBPS.get(version, 25.0)
        wire = {"kind": f"NVLink {version}, {count} links", "gbps": round(_USABLE * gbps, 3)}
        source = f"NVML: {count} links of version {version}; {gbps:g} GB/s, 80 % of it"
        # Both ends may tell of a link.
        links.append(_links(sorted(pairs - seen), {**wire, "latency_us": 0.5}, source))
        seen |= pairs
    return links


def _slots(gpus: Iterable[LocalGpu]) -> list[Json]:
    return [
        _links(
            [(f"gpu{gpu.index}", f"node{gpu.node}")],
            {"kind": "PCIe", "gbps": round(_USABLE * gbps, 3), "latency_us": 1},
            f"NVML: a slot of {gbps:g} GB/s, 80 % of it"
            if gpu.pcie_gbps
            else "an assumption: PCIe 4.0 x16",
        )
        for gpu in gpus
        for gbps in (gpu.pcie_gbps or 31.5,)
    ]
