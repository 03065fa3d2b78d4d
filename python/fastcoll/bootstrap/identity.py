# SPDX-License-Identifier: Apache-2.0
"""What a rank tells the others about itself before they meet, and whether they fit together.

Decides who may be in one group: the same node, user, version and numerics. Must not know how
the information travels.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastcoll import _C
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.topology.cpu import cpu_quota


def library_version() -> str:
    """Return the version of the installed fastcoll."""
    try:
        return version("fastcoll")
    except PackageNotFoundError:
        return "unknown"


def layout() -> str:
    """Return what two builds must have in common to share a region."""
    return f"{_C.region_bytes()}/{_C.K_SLOT_BYTES}/{_C.K_NUM_SLOTS}/{_C.K_INLINE_MAX_BYTES}"


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:
        return "unknown"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


@dataclass(frozen=True)
class Hello:
    """One rank's introduction.

    Attributes:
        node: Equal on two ranks exactly when they can meet on an abstract socket and map each
            other's memory: boot id, network and IPC namespaces.
        cpus: The CPUs it may run on.
        cpu_quota: How many CPUs its cgroup may keep busy.
        address: Name of the abstract socket on which the rank listens.
        token: What a peer must say to be let in.
        ranks: Ranks of the parent group that the new group is made of, for a subgroup.
        tuning: Digest of its tuning table, or nothing.
    """

    node: str
    host: str
    uid: int
    cpus: list[int]
    cpu_quota: int
    version: str
    layout: str
    numerics: str
    address: str
    token: str
    ranks: list[int]
    tuning: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can carry them."""
        return asdict(self)


def introduce(
    address: str, token: str, numerics: str, ranks: Sequence[int] = (), tuning: str = ""
) -> Hello:
    """Return this process's introduction."""
    return Hello(
        node=f"boot {_boot_id()}, {_namespace('net')}, {_namespace('ipc')}",
        host=os.uname().nodename,
        uid=os.getuid(),
        cpus=sorted(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(),
        version=library_version(),
        layout=layout(),
        numerics=numerics,
        address=address,
        token=token,
        ranks=list(ranks),
        tuning=tuning,
    )


def meet(rows: Sequence[dict[str, Any]]) -> list[Hello]:
    """Read everybody's introduction and check that they can form one group.

    Every rank comes to the same verdict.

    Raises:
        UsageError: Versions, users or numerics differ.
        UnsupportedError: The ranks are on several nodes.
    """
    for rank, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UsageError(f"rank {rank} introduced itself by something else than its facts")
    # The version first: another one's introduction may have other fields.
    _require_equal([str(row.get("version")) for row in rows], "versions of fastcoll")
    form = introduce("", "", "").to_dict()
    hellos = [_checked(rank, row, form) for rank, row in enumerate(rows)]
    _require_equal([hello.layout for hello in hellos], "builds of fastcoll")
    _require_equal([hello.numerics for hello in hellos], "numerics")
    nodes = _by_value([hello.node for hello in hellos])
    if len(nodes) > 1:
        sides = "; ".join(
            f"ranks {ranks} on {hellos[ranks[0]].host} ({node})" for node, ranks in nodes.items()
        )
        raise UnsupportedError(
            "hierarchical groups over several nodes are not there yet, and ranks in different "
            f"network or IPC namespaces (containers) count as such: {sides}. Make a group per node"
        )
    _require_equal([f"uid {hello.uid}" for hello in hellos], "users")
    return hellos


def _checked(rank: int, row: dict[str, Any], form: dict[str, Any]) -> Hello:
    """Return a rank's introduction; whoever can write to the store may have sent anything."""
    wrong = sorted(form.keys() ^ row.keys())
    wrong += [name for name in form.keys() & row.keys() if type(row[name]) is not type(form[name])]
    for name in ("cpus", "ranks"):
        if name not in wrong and not all(type(one) is int for one in row[name]):
            wrong.append(name)
    if wrong:
        raise UsageError(f"rank {rank} introduced itself with damaged facts: {', '.join(wrong)}")
    return Hello(**row)


def shared_cpus(hellos: Sequence[Hello]) -> int:
    """Return how many CPUs the ranks have between them: pinned ranks do not share one."""
    return min(len({cpu for h in hellos for cpu in h.cpus}), *(h.cpu_quota for h in hellos))


def _by_value(values: Sequence[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups


def _require_equal(values: Sequence[str], what: str) -> None:
    groups = _by_value(values)
    if len(groups) > 1:
        sides = "; ".join(f"{value} on ranks {ranks}" for value, ranks in groups.items())
        raise UsageError(f"the ranks of a group need equal {what}: {sides}")
