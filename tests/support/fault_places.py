# SPDX-License-Identifier: Apache-2.0
"""The places of faults: a site each, with the ranks that are odd there.

Decides how ranks live through a fault, and how their stories are judged. Each kind of call waits in
a group and in a thread of its own, so one fault meets all of them at once.
"""

import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.support.calls import Call
from tests.support.faults import (
    FAULTS,
    LATE,
    LOST,
    OF_FASTCOLL,
    TRANSFERS,
    WAITS,
    Fault,
    Rows,
    Scene,
    communicator_of,
)
from tests.support.harness import LATE_S, OVER, Attempt, Outcome, Pool, Rank, Setup, attempt
from tests.support.perform import forms_of
from tests.support.sites import TORCH, Site, across, in_torch, ranks_by_node


def waits_at(site: Site) -> Iterator[str]:
    """The kinds of call that can wait at a site."""
    for name, wait in WAITS.items():
        if not isinstance(wait, Call) or wait.algorithm in site.limits.algorithms:
            yield name
    if not in_torch(site):
        yield from OF_FASTCOLL


@dataclasses.dataclass(frozen=True)
class Place:
    """A site, and the ranks that faults befall there.

    Attributes:
        faults: The names of the faults that can be told there.
    """

    site: Site
    odd: tuple[int, ...]
    faults: tuple[str, ...] = tuple(FAULTS)

    def start(self) -> Pool:
        """Start ranks that no other test uses."""
        env = {"FASTCOLL_TORCH_BACKEND": "compiled"} if self.site.pools == "compiled_pools" else {}
        setup = Setup(init=not in_torch(self.site), nodes=self.site.nodes, env=env)
        return Pool(self.site.world, setup)

    def waits(self, fault: Fault) -> list[str]:
        """The kinds of call that meet a fault here."""
        names = list(waits_at(self.site))
        if not fault.names:
            return names
        if not in_torch(self.site):
            names.append("symmetric")
        return [name for name in fault.names if name in names]

    def others(self) -> list[int]:
        """The ranks that wait."""
        return [rank for rank in range(self.site.world) if rank not in self.odd]

    def survivors(self, left: Sequence[int], new_rank: int) -> "Survivors":
        """The group of those who are left, as one of them sees it."""
        nodes = [self.site.nodes[rank] for rank in left] if self.site.nodes else []
        kind, node_map = "Communicator", tuple[tuple[int, ...], ...]()
        if len(set(nodes)) > 1:
            kind = "HierarchicalCommunicator"
            node_map = tuple(map(tuple, ranks_by_node("".join(nodes)) or ()))
        size = len(left)
        return Survivors(kind, node_map, new_rank, size, (float(size),) * 3)


PLACES = {
    "one-node": Place(Site(3), (1,)),
    "one-node-two-odd": Place(Site(4), (1, 3), ("stopped", "late")),
    "nodes-aabb": Place(across("aabb"), (3,)),
    "nodes-aabb-leader": Place(across("aabb"), (2,)),
    "nodes-aab-whole": Place(
        across("aab"),
        (2,),
        (
            "killed",
            "killed in the middle",
            "stopped",
            "late",
            "aborts",
            "Ctrl-C",
            "a handler raises",
        ),
    ),
    "torch-python": Place(TORCH, (1,)),
    "torch-compiled": Place(dataclasses.replace(TORCH, pools="compiled_pools"), (1,)),
}

# ---- the part of the ranks -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Survivors:
    """A group that `shrink` made, and the sums of ones in it."""

    kind: str
    nodes: tuple[tuple[int, ...], ...]
    rank: int
    world_size: int
    sums: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Story:
    """The story of one rank.

    Attributes:
        rows: Its calls; empty if it left.
        after: The group that `shrink` made.
    """

    rows: Rows
    after: Survivors | None = None


def live_through(
    rank: Rank, name: str, odd: Sequence[int], waits: Sequence[str], key: str
) -> Story:
    """Wait in all kinds of call while a fault befalls the odd ranks; then go on without them."""
    from fastcoll.nodes.verdict import watch

    watch.GRACE_S = 3.0  # many threads on a busy machine reach their limits seconds apart
    fault = FAULTS[name]
    forms_of("all_reduce")  # by one thread: Python 3.11 can't parse sources in several
    groups = {wait: rank.comm.new_group() for wait in waits}
    for group in groups.values():
        group.barrier()  # nobody is late in its first call
    for group in groups.values():
        group.set_timeout(fault.limit_s)
    others = [one for one in range(rank.world_size) if one not in odd]
    absent = others.pop() if fault.needs_absent else None
    scene = Scene(rank, groups, odd[0] if absent is None else absent, key)

    rows: Rows | None = None
    if rank.rank in odd:
        scene.wait_for(others, "waits")
        time.sleep(0.3)  # it says so before it does
        rows = fault.strike(scene)
    if rank.rank == absent or (rank.rank in odd and fault.kind == LATE):
        scene.wait_for(others, "failed")
    if rank.rank in others:
        scene.tell("waits")
    if rows is None:
        rows = scene.make_all(fault.make)
    scene.tell("failed")
    scene.wait_for(set(range(rank.world_size)) - set(odd if fault.is_deadly else ()), "failed")
    after = None
    if fault.members == "all" or rank.rank not in odd:
        after = go_on(communicator_of(next(iter(groups.values()))))
    for group in groups.values():
        attempt(group.close)
    return Story(rows, after)


def go_on(group: Any) -> Survivors:
    """Make a group of those who are left and use it."""
    left = group.shrink()
    sums: list[float] = []
    for numel in (1, 5000, 300_000):
        tensor = torch.ones(numel)
        left.all_reduce(tensor)
        sums += torch.unique(tensor).tolist()
    part = left.new_group()
    part.all_reduce(tensor)
    part.close()
    assert left.name == f"{group.name}:1" or left.name == f"{group.name}, node 0:1", left.name
    nodes = left.node_map.nodes if hasattr(left, "node_map") else ()
    found = Survivors(type(left).__name__, nodes, left.rank, left.world_size, tuple(sums))
    left.close()
    return found


# ---- the part of the test ------------------------------------------------------------------------


def run_fault(pool: Pool, place: Place, name: str) -> list[Outcome]:
    """Let a fault befall the odd ranks of a place; return the story of each rank."""
    fault, key, waits = FAULTS[name], f"{name} at {place.odd}", place.waits(FAULTS[name])
    pool.start(place.site.in_group, live_through, name, place.odd, waits, key)
    if fault.is_stopped:
        for rank in place.others():
            pool.wait_for(f"{key}: rank {rank} failed")
        for rank in place.odd:
            os.kill(pool.pids[rank], signal.SIGCONT)
    return pool.collect()


def check_fault(place: Place, name: str, outcomes: Sequence[Outcome]) -> None:
    """Check that every rank has the error of the catalogue, in time."""
    fault = FAULTS[name]
    stories: dict[int, Story] = {}
    for one in outcomes:
        if one.rank in place.odd and fault.is_deadly:
            assert one.exit_code == fault.exit_code, one.describe()
            continue
        assert one.ok, one.describe()
        stories[one.rank] = one.value
    for wait in place.waits(fault):
        rows = {rank: story.rows[wait] for rank, story in stories.items() if story.rows}
        check_wait(place, fault, wait, rows)
    left = [rank for rank in stories if fault.members == "all" or rank not in place.odd]
    for new_rank, rank in enumerate(left):
        assert stories[rank].after == place.survivors(left, new_rank), stories[rank]


def check_wait(place: Place, fault: Fault, wait: str, rows: dict[int, list[Attempt]]) -> None:
    """Check the attempts of one kind of call, by rank."""
    waited_s = 0.0
    others = place.others()
    absent = others[-1] if fault.needs_absent else None
    for rank in others:
        first, then, *late = rows[rank]
        for one in (then, *late) if rank == absent else (first, then, *late):
            assert one.kind == fault.kind, (rank, one)
            assert one.ranks, (rank, one)
            assert set(one.ranks) <= set(place.odd), (rank, one)
            if fault.kind == LATE and wait not in TRANSFERS:  # which need one rank only
                assert one.ranks == place.odd, (rank, one)
                assert getattr(WAITS.get(wait), "verb", "") in one.text, (rank, one)
            for word in fault.words:
                assert word.format(rank=place.odd[0]) in one.text, (word, one)
            assert one.text.endswith(OVER), one
            assert (one.text, one.ranks) == (then.text, then.ranks), (one, then)
        limit_s = fault.limit_s if fault.kind == LATE else 0.0
        assert first.seconds < limit_s + LATE_S, first
        assert max(one.seconds for one in (then, *late)) < LATE_S, then
        waited_s = max(waited_s, first.seconds)
    assert fault.kind != LATE or waited_s >= 0.9 * fault.limit_s, rows
    for rank in place.odd if fault.own_kind else ():
        first, *late = rows[rank]
        assert first.kind == fault.own_kind or (fault.kind == LATE and not first.kind), first
        assert {one.kind for one in late} <= {fault.own_kind, fault.kind}, late
        assert max(one.seconds for one in rows[rank]) < LATE_S, rows[rank]
    if fault.kind != LOST:  # one verdict
        assert len({row[1].text for row in rows.values()}) == 1, rows
