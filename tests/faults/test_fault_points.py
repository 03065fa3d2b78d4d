# SPDX-License-Identifier: Apache-2.0
"""Every verb with a rank that is late, dies or stops at the points of the protocol it reaches.

Which points those are is counted in a call of each kind, not listed here.
"""

import dataclasses
import functools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from fastcoll.bootstrap.mesh import is_stopped
from tests.faults.fault_points import COMPILER, Points, build, ranks_from
from tests.proofs import LIBRARY
from tests.support.calls import Call, Place, difference, expected
from tests.support.environment import take_short_segments
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt
from tests.support.held import describe_more_held, list_held
from tests.support.perform import Started, _arenas
from tests.support.programs import need

pytestmark = [
    pytest.mark.proof(*LIBRARY, "tests/protocol/native"),
    pytest.mark.native,
    pytest.mark.timeout(600),
]

WORLD = 3
# Of a wait for a rank that is stopped; more than a virtual CPU may lose to its host.
LIMIT_S = 2.5

SYMMETRIC = (Place("symmetric", in_place=True),)
CASES = {
    "inlined": Call("all_reduce", "float32", 6),
    "inlined lines": Call("all_reduce", "float32", 250),
    "one_shot": Call("all_reduce", "float32", 40_000, algorithm="one_shot"),
    "two_shot": Call("all_reduce", "float32", 60_000, algorithm="two_shot"),
    "symmetric": Call("all_reduce", "float32", 60_000, algorithm="two_shot", places=SYMMETRIC),
    "ring": Call("all_reduce", "int32", 60_000, algorithm="ring"),
    "chain": Call("all_reduce", "float32", 60_000, algorithm="chain"),
    "schedule": Call("all_reduce", "float32", 60_000, algorithm="schedule:tree"),
    "reduce": Call("reduce", "float32", 60_000, algorithm="two_shot", root=1),
    "reduce_scatter": Call("reduce_scatter", "float32", 30_000),
    "all_gather": Call("all_gather", "float32", 60_000, algorithm="direct"),
    "broadcast": Call("broadcast", "float32", 600_000, root=1, algorithm="direct"),
    "gather": Call("gather", "float32", 60_000, root=1, algorithm="direct"),
    "scatter": Call("scatter", "float32", 30_000, root=1, algorithm="direct"),
    "all_to_all": Call("all_to_all", "float32", 30_000),
    "single copy": Call("broadcast", "float32", 60_000, root=1, algorithm="single_copy"),
    "small message": 10,
    "message in a bay": 500,
    "message in chunks": 15_000,
    "message copied": 60_000,
}
COPIED = "message copied"
assert COPIED in CASES


def setup_of(case: str) -> Setup:
    """Cut calls into several segments; let one case's messages be copied from who waits.

    Else it would be chance whether they are copied or come in chunks.
    """
    env = {"FASTCOLL_SINGLE_COPY": "always"} if case == COPIED else {}
    return Setup(env=env, prepare=take_short_segments)


def perform(group: Any, case: str) -> str:
    """Make the calls of a case; return what is wrong with the results."""
    what = CASES[case]
    if isinstance(what, Call):
        call = dataclasses.replace(what, root=min(what.root, group.world_size - 1))
        problem = one_call(group, call)
        # One in which not everybody waits, so that what comes next finds some ranks behind.
        return problem or one_call(group, Call("broadcast", "int32", 500, seed=1))
    mine, theirs = torch.full((what,), float(group.rank)), torch.empty(what)
    sending = group.isend(mine, (group.rank + 1) % group.world_size)
    source = (group.rank - 1) % group.world_size
    group.recv(theirs, source)
    sending.wait()
    return "" if bool((theirs == source).all()) else "a wrong message"


@functools.cache
def wanted(call: Call, world: int) -> list[np.ndarray]:
    return expected(call, world)


def one_call(group: Any, call: Call) -> str:
    words, problem = Started(group, call).result()
    want = wanted(call, group.world_size)[group.rank]
    return problem or difference(call, group.world_size, group.rank, want, words)


# ---- where a rank can be hit ------------------------------------------------------------------

Reached = list[dict[str, int]]  # by rank: how often it reaches which point


def count(rank: Rank, cases: list[str]) -> dict[str, dict[str, int]]:
    """How often this rank reaches each point in a case."""
    points, found = Points(), {}
    for case in cases:
        perform(rank.comm, case)
        points.arm()
        problem = perform(rank.comm, case)
        found[case] = points.disarm()
        assert not problem, problem
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ranks of this module have the library with fault points."""
    need(COMPILER)
    with ranks_from(build(tmp_path_factory.mktemp("fault-points"))):
        yield


@pytest.fixture(scope="module")
def pools(library: None) -> Iterator[dict[str, Pool]]:
    """Ranks for tests that leave them in order, by case."""
    usual, copying = (Pool(WORLD, setup_of(case)) for case in ("inlined", COPIED))
    yield {case: copying if case == COPIED else usual for case in CASES}
    for pool in (usual, copying):
        pool.close()


@pytest.fixture(scope="module")
def reached(pools: dict[str, Pool]) -> dict[str, Reached]:
    rows = {case: pool.run(count, [case]) for case, pool in pools.items()}
    return {case: [row[case] for row in rows[case]] for case in CASES}


@dataclasses.dataclass(frozen=True)
class Hit:
    """Where a rank is hit: in the middle of all the times that it reaches a point in a case."""

    victim: int
    point: str
    number: int


def hits(reached: Reached) -> list[Hit]:
    return [
        Hit(victim, point, (count + 1) // 2)
        for victim, row in enumerate(reached)
        for point, count in row.items()
    ]


def first_hits(reached: dict[str, Reached], case: str) -> list[Hit]:
    """One for each point that no earlier case reaches, and for each middle of a movement."""
    names = list(CASES)
    earlier = {point for one in names[: names.index(case)] for row in reached[one] for point in row}
    chosen: dict[str, Hit] = {}
    for hit in hits(reached[case]):
        is_middle = not hit.point.startswith(("before ", "after "))
        # Another rank each time, where another one gets there.
        is_turn = hit.victim == (len(chosen) + names.index(case)) % WORLD
        if (is_middle or hit.point not in earlier) and (is_turn or hit.point not in chosen):
            chosen[hit.point] = hit
    return list(chosen.values())


# ---- late --------------------------------------------------------------------------------


def be_late(rank: Rank, case: str, hits: list[Hit], bug: str = "") -> tuple[list[str], int]:
    """Make the case's calls with each of these delays; what was wrong, and how often I was late."""
    points, problems, num_delays = Points(), [], 0
    if bug:
        points.plant(bug)
    for hit in hits:
        is_mine = hit.victim == rank.rank
        if is_mine:
            points.arm(hit.point, hit.number, "delay")
        problem = perform(rank.comm, case)
        if is_mine:
            num_delays += points.disarm().get(hit.point, 0) >= hit.number
        problems += [f"{hit}: {problem}"] if problem else []
    return problems, num_delays


@pytest.mark.parametrize("case", CASES)
def test_late(pools: dict[str, Pool], reached: dict[str, Reached], case: str) -> None:
    plan = hits(reached[case])
    rows = pools[case].run(be_late, case, plan)
    assert not [problem for problems, _ in rows for problem in problems]
    # How often a rank comes by depends on when the others do, but only a little.
    assert sum(num_delays for _, num_delays in rows) >= 0.9 * len(plan)


def test_a_delay_finds_a_planted_bug(library: None, reached: dict[str, Reached]) -> None:
    """A slot that is rewritten before all have read it: seen by whoever is late in reading."""
    plan = [hit for hit in hits(reached["broadcast"]) if hit.point == "copy"] * 3
    pool = Pool(WORLD, setup_of("broadcast"))
    try:
        outcomes = pool.outcomes(be_late, "broadcast", plan, "unchecked_done")
    finally:
        pool.close()
    assert any(not outcome.ok or outcome.value[0] for outcome in outcomes)


# ---- dead --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Story:
    """A rank's report of a hit: the error it met, what was wrong, and who went on."""

    error: Attempt
    problem: str = ""
    members: int = 0
    left_over: str = ""


def until_error(group: Any, case: str, problems: list[str]) -> None:
    """Make calls that end in an error, whatever the rank that is hit has done before."""
    for _ in range(3):
        problems.append(perform(group, case))
    group.barrier()


def go_on(group: Any, case: str, error: Attempt, problems: list[str]) -> Story:
    """Make a group of who is left, use it, and see that nothing stays of either."""
    survivors = group.shrink()
    members = survivors.world_size
    problems.append(perform(survivors, case))
    for one in (survivors, group):
        one.close()
        _arenas.pop(one, None)
    return Story(error, "".join(problems), members)


def outlive(rank: Rank, case: str, hit: Hit) -> Story:
    """See a rank die at a point of a case's calls, and go on without it."""
    perform(rank.comm, case)
    before = list_held()
    group = rank.comm.new_group()
    perform(group, case)
    if rank.rank == hit.victim:
        Points().arm(hit.point, hit.number, "kill")
    problems: list[str] = []
    error = attempt(until_error, group, case, problems)
    story = go_on(group, case, error, problems)
    del group
    return dataclasses.replace(story, left_over=describe_more_held(before))


@pytest.mark.parametrize("case", CASES)
def test_dead(reached: dict[str, Reached], case: str) -> None:
    for hit in first_hits(reached, case):
        pool = Pool(WORLD, setup_of(case))
        try:
            outcomes = pool.outcomes(outlive, case, hit)
        finally:
            pool.close()
        for outcome in outcomes:
            if outcome.rank == hit.victim:
                assert outcome.exit_code == -signal.SIGKILL, (hit, outcome.describe())
                continue
            assert outcome.ok, (hit, outcome.describe())
            story = outcome.value
            assert story.error.kind == "PeerLostError", (hit, story)
            assert story.error.ranks == (hit.victim,), (hit, story)
            assert story.error.seconds < LATE_S, (hit, story)
            assert story.members == WORLD - 1
            assert not story.problem + story.left_over, (hit, story)


# ---- stopped --------------------------------------------------------------------------------


def outwait(rank: Rank, case: str, hit: Hit) -> Story:
    """See a rank stop at a point; when it goes on it meets the same verdict, and is taken along."""
    perform(rank.comm, case)
    before = list_held()
    group = rank.hasty_group(LIMIT_S)
    if rank.rank == hit.victim:
        Points().arm(hit.point, hit.number, "stop")
    problems: list[str] = []
    error = attempt(until_error, group, case, problems)
    rank.tell(f"error {rank.rank} of {case} {hit}")
    for other in range(rank.world_size):
        rank.wait_for(f"error {other} of {case} {hit}")
    story = go_on(group, case, error, problems)
    del group
    return dataclasses.replace(story, left_over=describe_more_held(before))


def check_stopped(case: str, plan: list[Hit]) -> None:
    world = WORLD if isinstance(CASES[case], Call) else 2  # or who waits for whom is a chain
    pool = Pool(world, setup_of(case))
    try:
        for hit in plan:
            hit = dataclasses.replace(hit, victim=hit.victim % world)
            pool.start(outwait, case, hit)
            for rank in range(world):
                if rank != hit.victim:
                    pool.wait_for(f"error {rank} of {case} {hit}")
            assert is_stopped(pool.pids[hit.victim]), hit
            os.kill(pool.pids[hit.victim], signal.SIGCONT)
            for rank, story in enumerate(pool.finish()):
                assert story.error.kind == "CollectiveTimeout", (hit, story)
                assert story.error.ranks == (hit.victim,), (hit, rank, story)
                assert f"process {pool.pids[hit.victim]} is stopped" in story.error.text, (
                    hit,
                    story,
                )
                assert story.members == world
                assert not story.problem + story.left_over, (hit, story)
    finally:
        pool.close()


def test_stopped(reached: dict[str, Reached]) -> None:
    """Some cases at a time, as they wait for the limit."""
    plans = [
        (case, [hit for hit in first_hits(reached, case) if not hit.point.startswith("after ")])
        for case in CASES
    ]
    with ThreadPoolExecutor(3) as threads:
        for checked in [threads.submit(check_stopped, *one) for one in plans]:
            checked.result()
