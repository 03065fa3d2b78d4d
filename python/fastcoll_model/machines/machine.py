# SPDX-License-Identifier: Apache-2.0
"""Machines, networks and clusters of them as data: the wires between devices, and their speed.

Decides the file format (`topology.schema.json`), which contradictions it refuses, and which way
traffic takes. Knows nothing of the machine it runs on, of schedules or of collectives.
"""

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastcoll_model.documents import check, read_json
from fastcoll_model.errors import ModelError, did_you_mean

_SCHEMA = Path(__file__).with_name("topology.schema.json")
_CATALOGUE = Path(__file__).parents[1] / "catalogue"
MACHINES = tuple(sorted(path.stem for path in (_CATALOGUE / "machines").glob("*.json")))
NETWORKS = tuple(sorted(path.stem for path in (_CATALOGUE / "networks").glob("*.json")))


@dataclass(frozen=True)
class Wire:
    """A link between two devices: `gbps` is 10^9 bytes a second in each direction."""

    kind: str
    gbps: float
    latency_us: float
    source: str


@dataclass(frozen=True)
class Machine:
    """One node.

    Attributes:
        ranks: The devices that ranks run on, in the order of ranks. Traffic does not pass through
            them: a device that is no rank (a switch, a socket, a card) forwards.
        wires: (device, device) -> wire, both ways.
        nics: Which network card a rank uses.
        multicast: The switch that can add and multicast, or "".
        reduce_gbps, copy_gbps: 10^9 bytes a second that a rank adds to others, or copies.
        memory_gb: 10^9 bytes of memory of a rank.
        tflops: Dense bf16, 10^12 operations a second of a rank; 0 if not known.
    """

    name: str
    title: str
    ranks: tuple[str, ...]
    wires: dict[tuple[str, str], Wire] = field(repr=False)
    nics: dict[str, str] = field(default_factory=dict, repr=False)
    multicast: str = ""
    reduce_gbps: float = 1.0
    copy_gbps: float = 1.0
    memory_gb: float = 1.0
    tflops: float = 0.0
    source: str = ""

    @cached_property
    def neighbours(self) -> dict[str, list[str]]:
        """For each device those it is wired to."""
        found: dict[str, list[str]] = {}
        for one, other in self.wires:
            found.setdefault(one, []).append(other)
        return found

    @cached_property
    def _ways(self) -> dict[str, dict[str, tuple[str, ...]]]:
        return {}

    def way(self, source: str, destination: str) -> tuple[str, ...]:
        """Return the devices from one to another: the widest way, of these the fastest."""
        if source not in self._ways:
            self._ways[source] = self._widest(source)
        return self._ways[source][destination]

    def _widest(self, source: str) -> dict[str, tuple[str, ...]]:
        """Return the way to everything that can be reached."""
        ranks = set(self.ranks)
        done: dict[str, tuple[str, ...]] = {}
        queue: list[tuple[float, float, tuple[str, ...]]] = [(-float("inf"), 0.0, (source,))]
        while queue:
            width, latency, path = heapq.heappop(queue)
            here = path[-1]
            if here in done:
                continue
            done[here] = path
            if here != source and here in ranks:
                continue
            for there in self.neighbours.get(here, []):
                wire = self.wires[here, there]
                narrowest = max(width, -wire.gbps)
                heapq.heappush(queue, (narrowest, latency + wire.latency_us, (*path, there)))
        return done

    def bottleneck(self, source: str, destination: str) -> Wire:
        """Return the slowest wire of the way."""
        way = self.way(source, destination)
        return min((self.wires[hop] for hop in pairwise(way)), key=lambda w: w.gbps)


@dataclass(frozen=True)
class Network:
    """The network between the nodes: leaf switches and a spine.

    Attributes:
        gbps: 10^9 bytes a second of a card, in each direction.
        latency_us: From rank to rank through one leaf; `spine_latency_us` more over the spine.
        rails: The i-th cards of all nodes share leaves; else all cards of a node do.
        nodes_per_leaf: Nodes that have cards on one leaf.
        oversubscription: Bandwidth below a leaf over that above it.
    """

    name: str
    title: str
    gbps: float
    latency_us: float
    spine_latency_us: float
    rails: bool
    nodes_per_leaf: int
    oversubscription: float
    source: str = ""


def _checked(document: object, path: str, kind: str) -> dict[str, Any]:
    """Return a copy of a document that fits the schema of its kind."""
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise ModelError(f'{path}: "kind" is not "{kind}"')
    schema = _schema()
    [branch] = [each for each in schema["oneOf"] if each["title"] == kind]
    check(document, {"$defs": schema["$defs"], **branch}, path)
    return dict(document)


@cache
def _schema() -> Any:
    return json.loads(_SCHEMA.read_text())


def _path(name: str, kind: str, known: tuple[str, ...]) -> Path:
    if name in known:
        return _CATALOGUE / f"{kind}s" / f"{name}.json"
    if name.endswith(".json"):
        return Path(name)
    raise ModelError(
        f"no {kind} {name!r}{did_you_mean(name, known)}; give a .json file, or one of "
        f"{', '.join(known)}"
    )


def load_machine(name: str) -> Machine:
    """Return a machine that comes with fastcoll, or one from a file.

    Raises:
        ModelError: There is no such file or name, or the file contradicts itself or the schema.
    """
    return machine_of(machine_file(name), str(_path(name, "machine", MACHINES)))


def machine_file(name: str) -> Any:
    """Return the document of a machine that comes with fastcoll, or of a file.

    Raises:
        ModelError: There is no such file or name.
    """
    return read_json(_path(name, "machine", MACHINES))


def network_file(name: str) -> Any:
    """Return the document of a network that comes with fastcoll, or of a file.

    Raises:
        ModelError: There is no such file or name.
    """
    return read_json(_path(name, "network", NETWORKS))


def machine_of(document: object, path: str) -> Machine:
    """Return the machine of a document; `path` is its name in a refusal.

    Raises:
        ModelError: The document contradicts itself or the schema.
    """
    checked = _checked(document, path, "machine")
    wires: dict[tuple[str, str], Wire] = {}
    for i, group in enumerate(checked["links"]):
        wire = Wire(group["kind"], group["gbps"], group["latency_us"], group["source"])
        for j, (one, other) in enumerate(group["between"]):
            where = f"{path}: at links/{i}/between/{j}"
            if one == other:
                raise ModelError(f"{where}: {one!r} is linked to itself")
            _known((one, other), checked["ranks"], where)
            if (one, other) in wires:
                raise ModelError(f"{where}: {one!r} and {other!r} are linked twice; add them up")
            wires[one, other] = wires[other, one] = wire
    del checked["format"], checked["kind"], checked["links"]
    checked["ranks"] = tuple(checked["ranks"])
    machine = Machine(wires=wires, **checked)
    _connected(machine, path)
    return machine


def _known(devices: Iterable[str], ranks: Sequence[str], where: str) -> None:
    """Refuse a device that is called like the ranks, and is none of them."""
    kinds = {rank.rstrip("0123456789") for rank in ranks if rank[-1].isdigit()}
    for device in devices:
        if device not in ranks and device[-1].isdigit() and device.rstrip("0123456789") in kinds:
            raise ModelError(
                f"{where}: there is no {device!r} among the ranks {', '.join(ranks[:16])}; add it "
                "to them, or correct the link"
            )


def _connected(machine: Machine, path: str) -> None:
    """Refuse wires to missing devices, and devices without a way to them."""
    for i, rank in enumerate(machine.ranks):
        if rank not in machine.neighbours and len(machine.ranks) > 1:
            raise ModelError(f"{path}: at ranks/{i}: no link leads to {rank!r}")
    for rank, nic in machine.nics.items():
        if rank not in machine.ranks:
            raise ModelError(f"{path}: at nics/{rank}: there is no rank {rank!r}")
        if nic not in machine.neighbours:
            raise ModelError(f"{path}: at nics/{rank}: no link leads to {nic!r}")
    for device in [machine.multicast] if machine.multicast else []:
        lonely = [r for r in machine.ranks if (r, device) not in machine.wires]
        if lonely:
            raise ModelError(f"{path}: at multicast: {device!r} has no link to {lonely[0]!r}")
    for source in machine.ranks:
        targets = [*machine.ranks, *filter(None, [machine.nics.get(source)])]
        cut_off = [t for t in targets if t not in machine._widest(source)]
        if cut_off:
            raise ModelError(f"{path}: no way leads from {source!r} to {cut_off[0]!r}")


def load_network(name: str) -> Network:
    """Return a network that comes with fastcoll, or one from a file.

    Raises:
        ModelError: There is no such file or name, or the file does not fit the schema.
    """
    document = _checked(network_file(name), str(_path(name, "network", NETWORKS)), "network")
    del document["format"], document["kind"]
    return Network(**document)


def cards_of(machine: Machine) -> dict[str, int]:
    """Return for each network card how many ranks use it, in the order of the ranks."""
    return dict(Counter(machine.nics[rank] for rank in machine.ranks if rank in machine.nics))
