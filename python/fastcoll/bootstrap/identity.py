# SPDX-License-Identifier: Apache-2.0
"""The introduction that a rank sends to the others before they meet, and the check that they fit.

Decides which ranks may be in one group (the same version, settings and, within a node, user) and
which ranks share a node. Must not know how the information travels.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, get_origin

from fastcoll import env
from fastcoll.bootstrap.node_map import NodeMap
from fastcoll.bootstrap.os_errors import explain
from fastcoll.errors import DriverError, UsageError
from fastcoll.machine.cpu import affinity, cpu_quota
from fastcoll.native import _C

_REFUSAL = "could not come"
_MOST_RANKS = _C.K_MAX_WORLD  # that share one region
# A rank that sees another CPU would look for its peers' bytes in other places.
_CPUS = (
    "kinds of CPU (an emulator shows its process another one: run all ranks under it, or give that "
    "rank a FASTCOLL_NODE_ID of its own)"
)


@cache  # reading it takes a millisecond, and each group asks
def library_version() -> str:
    try:
        return version("fastcoll")
    except PackageNotFoundError:
        return "unknown"


def layout() -> str:
    """Return the sizes that two builds must have in common to share a region."""
    return f"{_C.region_bytes()}/{_C.K_SLOT_BYTES}/{_C.K_NUM_SLOTS}/{_C.K_INLINE_MAX_BYTES}"


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except (FileNotFoundError, PermissionError):
        return "unknown"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, PermissionError):
        return os.uname().nodename


@dataclass(frozen=True)
class Hello:
    """One rank's introduction."""

    node: str  # equal on two ranks exactly when they are to share memory
    # Equal on two ranks exactly when they can meet on an abstract socket and map each other's
    # memory: boot id and network namespace. Memory without a name knows no IPC namespace, and a
    # descriptor of it is handed over between all process namespaces.
    machine: str
    host: str
    uid: int
    cpus: list[int]  # the CPUs it may run on
    cpu_quota: int  # how many CPUs its cgroup may keep busy
    version: str
    layout: str
    ring_ways: str  # which lines its CPU writes next (CopyWays in csrc/cpu/copy.h)
    numerics: str
    hop: str  # how the group moves bytes between nodes, if it has several
    address: str  # name of the abstract socket on which the rank listens
    token: str  # the secret that a peer must send to be accepted
    ranks: list[int]  # ranks of the parent group that the new group is made of, for a subgroup
    tuning: str = ""  # digest of its tuning table, or nothing
    serves_store: bool = False  # whether the store of the group ends with this process

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can carry them."""
        return asdict(self)


@dataclass(frozen=True)
class Terms:
    """The terms that all ranks of a group must share."""

    numerics: str  # the promise of the group's arithmetic
    hop: str  # that promise between nodes, and the carrier; compared if there are several nodes


def machine() -> str:
    """Return a name for the memory that this process can share, different from all other memory's.

    Raises:
        OSError: It can't be read just now; a guess would make another node of this process.
    """
    return f"boot {_boot_id()}, {_namespace('net')}"


def describe_rank(
    address: str,
    token: str,
    terms: Terms,
    ranks: Sequence[int] = (),
    tuning: str = "",
    serves_store: bool = False,
) -> Hello:
    """Return this process's introduction."""
    here = machine()
    return Hello(
        node=env.NODE_ID.get() or here,
        machine=here,
        host=os.uname().nodename,
        uid=os.getuid(),
        cpus=sorted(affinity()),
        cpu_quota=cpu_quota(),
        version=library_version(),
        layout=layout(),
        ring_ways=_C.ring_ways(),
        numerics=terms.numerics,
        hop=terms.hop,
        address=address,
        token=token,
        ranks=list(ranks),
        tuning=tuning,
        serves_store=serves_store,
    )


def refusal_to_join(error: OSError | MemoryError) -> dict[str, Any]:
    """Return the message that a rank sends in place of its introduction when it can't come."""
    return {_REFUSAL: explain(error)}


def meet(rows: Sequence[dict[str, Any]]) -> list[Hello]:
    """Read the introductions of all ranks and check that they can form one group.

    Every rank comes to the same verdict.

    Raises:
        UsageError: Versions, builds or numerics differ.
        DriverError: A rank sent a refusal.
    """
    for rank, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UsageError(f"rank {rank} introduced itself by something else than its facts")
        if row.keys() == {_REFUSAL}:
            raise DriverError(f"rank {rank} could not come: {row[_REFUSAL]}")
    # The version first: another one's introduction may have other fields.
    _require_equal([str(row.get("version")) for row in rows], "versions of fastcoll")
    hellos = [_checked(rank, row) for rank, row in enumerate(rows)]
    _require_equal([hello.layout for hello in hellos], "builds of fastcoll")
    _require_equal([hello.numerics for hello in hellos], "numerics")
    return hellos


def _checked(rank: int, row: dict[str, Any]) -> Hello:
    """Return a rank's introduction. Any process that can write to the store may have sent it."""
    form = {field.name: get_origin(field.type) or field.type for field in fields(Hello)}
    wrong = sorted(form.keys() ^ row.keys())
    wrong += [name for name in form.keys() & row.keys() if type(row[name]) is not form[name]]
    for name in ("cpus", "ranks"):
        if name not in wrong and not all(type(one) is int for one in row[name]):
            wrong.append(name)
    if wrong:
        raise UsageError(f"rank {rank} introduced itself with damaged facts: {', '.join(wrong)}")
    return Hello(**row)


def map_nodes(hellos: Sequence[Hello]) -> NodeMap:
    """Return which ranks share memory, and check that those do fit together.

    A machine of more ranks than share one region is several nodes. Every rank comes to the same
    verdict.

    Raises:
        UsageError: Ranks of one node are on different machines, of different users or see different
            CPUs. Or there are several nodes and the ranks want different carriers.
    """
    nodes: list[tuple[int, ...]] = []
    for ranks in _by_value([hello.node for hello in hellos]).values():
        here = [hellos[rank] for rank in ranks]
        if len({hello.machine for hello in here}) > 1:
            sides = "; ".join(f"rank {rank} in {hellos[rank].machine}" for rank in ranks)
            raise UsageError(
                f"ranks {ranks} have FASTCOLL_NODE_ID={here[0].node!r}, but not all of them can "
                f"share memory: {sides}. Give each machine or container an id of its own"
            )
        _require_equal([f"uid {hello.uid}" for hello in here], "users", ranks)
        _require_equal([hello.ring_ways for hello in here], _CPUS, ranks)
        nodes += _split(ranks)
    if len(nodes) > 1:
        _require_equal([hello.hop for hello in hellos], "ways between nodes")
    nodes.sort()
    firsts = [hellos[ranks[0]] for ranks in nodes]
    hosts, ids = (tuple(getattr(one, name) for one in firsts) for name in ("host", "node"))
    return NodeMap(tuple(nodes), hosts, ids)


def _split(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ranks of a machine as the fewest nodes, of equal size but for one rank.

    A node has ranks that follow each other: launchers give these to one socket.
    """
    num_nodes = -(-len(ranks) // _MOST_RANKS)
    bounds = [len(ranks) * node // num_nodes for node in range(num_nodes + 1)]
    return [tuple(ranks[first:end]) for first, end in pairwise(bounds)]


def why_apart(hellos: Sequence[Hello]) -> str:
    """Return the reason why ranks of one machine can't share memory; empty if they can.

    Nodes that FASTCOLL_NODE_ID names are apart by intention, and give no reason.
    """
    boots: dict[str, dict[str, list[int]]] = {}
    for rank, hello in enumerate(hellos):
        boot, _, network = hello.machine.rpartition(", ")
        if hello.node == hello.machine:
            boots.setdefault(boot, {}).setdefault(network, []).append(rank)
    apart = [sides for sides in boots.values() if len(sides) > 1]
    if not apart:
        return ""
    sides = "; ".join(
        ", ".join(f"ranks {ranks} in {network}" for network, ranks in some.items())
        for some in apart
    )
    return (
        f"ranks of one machine have different network namespaces and can't share memory: {sides}. "
        "Their data takes the way between nodes, which is slower. Start their containers in one "
        "network (docker run --network=host)"
    )


def require_same_nodes(hellos: Sequence[Hello], ranks: Sequence[int], before: NodeMap) -> None:
    """Check that some ranks of a group share memory with the same ranks as when it was made.

    Every rank comes to the same verdict.

    Raises:
        UsageError: They do not.
    """
    ids = [before.ids[before.places[rank][0]] for rank in ranks]
    was, found = (
        sorted(sorted(ranks[at] for at in some) for some in _by_value(names).values())
        for names in (ids, [one.node for one in hellos])
    )
    if found != was:
        raise UsageError(
            f"the nodes of this group are ranks {was}, but its processes say by now that they are "
            f"{found}. Give FASTCOLL_NODE_ID its value before init() and leave it, and leave the "
            "processes in their namespaces"
        )


def shared_cpus(hellos: Sequence[Hello]) -> int:
    """Return how many CPUs the ranks have between them: pinned ranks do not share one."""
    return min(len({cpu for h in hellos for cpu in h.cpus}), *(h.cpu_quota for h in hellos))


def _by_value(values: Sequence[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups


def _require_equal(values: Sequence[str], what: str, ranks: Sequence[int] | None = None) -> None:
    groups = _by_value(values)
    if len(groups) > 1:
        names = range(len(values)) if ranks is None else ranks
        sides = "; ".join(
            f"{value} on ranks {[names[idx] for idx in found]}" for value, found in groups.items()
        )
        raise UsageError(f"the ranks of a group need equal {what}: {sides}")
