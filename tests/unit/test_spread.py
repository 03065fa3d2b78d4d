# SPDX-License-Identifier: Apache-2.0
"""Where a rank goes that shares its CPU with too many others: to the one with the fewest, once."""

import os
from collections.abc import Iterator

import pytest

from fastcoll import _C


@pytest.fixture
def two_cpus() -> Iterator[tuple[int, int]]:
    """Two CPUs, the only ones that this process may use meanwhile."""
    allowed = os.sched_getaffinity(0)
    here, there = sorted(allowed)[:2]
    os.sched_setaffinity(0, {here, there})
    yield here, there
    os.sched_setaffinity(0, allowed)


def test_the_last_of_three_goes(two_cpus: tuple[int, int]) -> None:
    here, there = two_cpus
    assert goes([here, there, here, here], 3, here, there)


def test_a_free_cpu_is_taken(two_cpus: tuple[int, int]) -> None:
    here, there = two_cpus
    assert goes([here, here], 1, here, there)


def goes(cpus: list[int], rank: int, here: int, there: int) -> bool:
    """Return whether it is there afterwards in most of 20 tries.

    Not in all: it may use both CPUs then, and the scheduler may take it back at once.
    """
    num_there = 0
    for _ in range(20):
        os.sched_setaffinity(0, {here})
        os.sched_setaffinity(0, {here, there})
        assert _C.spread_out(cpus, rank)
        num_there += current_cpu() == there
        assert os.sched_getaffinity(0) == {here, there}  # it may come back
    return num_there > 10


def test_the_others_stay(two_cpus: tuple[int, int]) -> None:
    here, there = two_cpus
    unknown = 2**32 - 1
    assert not _C.spread_out([here, here, here, there], 1)  # rank 2 goes
    assert not _C.spread_out([here, there, here, there], 2)  # even
    assert not _C.spread_out([here, there, here], 2)  # one more is no better there
    assert not _C.spread_out([there, unknown], 1)  # this rank does not know where it is


def test_who_is_pinned_stays() -> None:
    allowed = os.sched_getaffinity(0)
    here = min(allowed)
    try:
        os.sched_setaffinity(0, {here})
        assert not _C.spread_out([here, here, here], 2)
        assert os.sched_getaffinity(0) == {here}
    finally:
        os.sched_setaffinity(0, allowed)


def current_cpu() -> int:
    with open("/proc/thread-self/stat") as text:
        return int(text.read().rpartition(")")[2].split()[36])
