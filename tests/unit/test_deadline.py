# SPDX-License-Identifier: Apache-2.0
"""A deadline counts the time in which the process ran; a wait looks at the clock all the while."""

import time

import pytest

from fastcoll.bootstrap import deadline
from fastcoll.bootstrap.deadline import Deadline

LIMIT_S = 10.0


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def run(self, seconds: float) -> None:
        """Pass as in a process that looks at the clock."""
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            deadline.running_s()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(deadline, "running_s", deadline._RunningClock().now_s)
    return clock


def test_time_that_ran_counts(clock: Clock) -> None:
    limit = Deadline(LIMIT_S)
    clock.run(LIMIT_S - 1)
    assert limit.left_s() == pytest.approx(1.0)
    clock.run(1.1)
    assert limit.passed()


def test_time_that_stood_still_hardly_counts(clock: Clock) -> None:
    limit = Deadline(LIMIT_S)
    clock.now_s += 1e6
    assert limit.left_s() >= LIMIT_S - 0.5
    clock.run(LIMIT_S - 1)
    assert not limit.passed()


def test_a_wait_ends_with_what_it_waits_for(clock: Clock) -> None:
    answers = iter(["", "", "there"])
    assert Deadline(LIMIT_S).wait(lambda wait_s: next(answers)) == "there"


def test_a_wait_ends_at_the_limit(clock: Clock) -> None:
    waited: list[float] = []

    def wait(wait_s: float) -> str:
        waited.append(wait_s)
        clock.now_s += wait_s
        return ""

    assert Deadline(LIMIT_S).wait(wait) == ""
    assert sum(waited) == pytest.approx(LIMIT_S)
    assert max(waited) <= 0.1


def test_a_wait_of_no_time_looks_once(clock: Clock) -> None:
    assert Deadline(0).wait(lambda wait_s: [wait_s]) == [0.0]
