# SPDX-License-Identifier: Apache-2.0
"""Episodes of random calls and faults (soak.py): a few here, as many as you like by its command."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults import soak, soak_flat


@pytest.mark.slow
def test_killed_at_random_points() -> None:
    results = [soak.episode(seed, ("kill",)) for seed in (1, 2)]
    assert not [problem for result in results for problem in result.problems]
    assert sum(result.num_faults for result in results) >= 2
    assert sum(result.num_checked for result in results) > 50
    assert any(result.heard_s for result in results)


@pytest.mark.slow
def test_each_fault_and_everything_at_random() -> None:
    """One fault at a time, so that each is known to happen; then episodes of all.

    Several are played at a time: ranks wait for limits most of the time, longest where one stops.
    """
    kinds = sorted(soak.FAULTS, key="stop".__ne__)
    episodes: list[tuple[Any, ...]] = [(seed, (kind,)) for kind in kinds for seed in (11, 12)]
    episodes += [(seed,) for seed in range(100, 115)]
    with ThreadPoolExecutor(4) as threads:
        results = threads.map(lambda played: soak.episode(*played), episodes)
        for played, result in zip(episodes, results, strict=True):
            assert not result.problems, f"soak.episode{played}: {result.problems}"


def test_a_wrong_result_is_a_problem() -> None:
    """The ranks' reports are judged: a wrong word, somebody blamed for nothing, two groups."""
    lives = [soak.Life(members=[0, 1]), soak.Life(members=[0, 1])]
    outcomes = [soak.Outcome(rank, life) for rank, life in enumerate(lives)]
    faults = [soak.Fault("pause", 0, 3)]
    assert not soak.judge(faults, outcomes)
    lives[0].wrong.append("word 3 differs")
    lives[1].errors.append((0.0, "PeerLostError", (0,)))
    lives[1].members = [1]
    lives[1].left_over = "held more"
    problems = soak.judge(faults, outcomes)
    for word in ("word 3", "PeerLostError", "different groups", "held more"):
        assert any(word in problem for problem in problems), problems
    faults = [soak.Fault("stop", 1, 3)]
    lives[0] = soak.Life(errors=[(0.0, "CollectiveTimeout", (1,))], members=[0])
    lives[1] = soak.Life(members=[0, 1])  # it was through with all its calls
    assert not soak.judge(faults, [soak.Outcome(rank, life) for rank, life in enumerate(lives)])
    lives[1].errors = lives[0].errors
    problems = soak.judge(faults, [soak.Outcome(rank, life) for rank, life in enumerate(lives)])
    assert any("different groups" in problem for problem in problems), problems
    died = [outcomes[0], soak.Outcome(1, exit_code=-11)]
    assert any("ended" in problem for problem in soak.judge(faults, died))


@pytest.mark.slow
@pytest.mark.parametrize("leak", [False, True])
def test_those_who_last_do_not_grow(leak: bool) -> None:
    """With a leak planted as proof that one would be seen."""
    samples, problems = soak_flat.endure(10, 300, leak=leak)
    assert all(len(mine) >= 15 for mine in samples)
    if not leak:
        assert not problems
    for rank in range(soak_flat.VICTIM) if leak else ():
        assert any(f"rank {rank}: rss_mib rose" in one for one in problems), problems
        assert any(f"rank {rank}: descriptors rose" in one for one in problems), problems
