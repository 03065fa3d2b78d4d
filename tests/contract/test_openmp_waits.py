# SPDX-License-Identifier: Apache-2.0
"""How long OpenMP's waiting threads spin in ranks that have more threads than CPUs."""

import os
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

import fastcoll
from tests.support.environment import ranks_with
from tests.support.harness import Pool, Rank, Setup

CPUS = len(os.sched_getaffinity(0))
SPUN_S = 0.0005  # libgomp's 300,000 spins take 1 ms and more, its 100 spins 10 us
KEEPS = {"FASTCOLL_OPENMP_WAITS": "keep"}

pytestmark = pytest.mark.skipif(CPUS < 2, reason="one CPU: torch has no second thread")


def spun_s() -> float:
    """Return the CPU time that waiting threads took beside this one, which rested."""
    square = torch.ones(512, 512)
    torch.mm(square, square)
    start = time.process_time()
    time.sleep(0.1)
    return time.process_time() - start


def threads_spin() -> bool:
    """Look until a thread spins, at most 5 s: on a busy machine it may get no CPU."""
    time.sleep(0.05)  # for a thread that has just begun or ended
    return any(spun_s() > SPUN_S for _ in range(50))


def threads_rest() -> bool:
    """Return whether most waits are brief: other threads of the process may run."""
    time.sleep(0.05)
    return sorted(spun_s() for _ in range(5))[2] <= SPUN_S


def spun_around_a_group(rank: Rank, rests: bool) -> list[bool]:
    """Return whether threads spun before a group was made, while it was there, and afterwards."""
    torch.set_num_threads(CPUS)
    before = threads_spin()
    fastcoll.init(store=rank.store, rank=rank.rank, world_size=rank.world_size)
    during = not threads_rest() if rests else threads_spin()
    fastcoll.barrier()
    fastcoll.destroy()
    return [before, during, threads_spin()]


def spins(ranks: int, env: dict[str, str], rests: bool = True) -> list[list[bool]]:
    """Return, for each rank, whether its threads spun before, during and after a group.

    rests: They should rest during it.
    """
    with closing(Pool(ranks, Setup(init=False, env=env))) as pool:
        found: list[list[bool]] = pool.run(spun_around_a_group, rests)
        return found


@pytest.fixture(scope="module")
def openmp_as_usual() -> Iterator[None]:
    with ranks_with(OMP_NUM_THREADS=str(CPUS)):
        yield


@pytest.mark.long
@pytest.mark.usefixtures("openmp_as_usual")
def test_threads_that_share_cpus_wait_briefly_during_a_group() -> None:
    assert spins(2, {}) == [[True, False, True]] * 2


@pytest.mark.long
@pytest.mark.usefixtures("openmp_as_usual")
def test_they_are_left_alone_where_the_user_says_so() -> None:
    assert spins(2, KEEPS, rests=False) == [[True, True, True]] * 2


@pytest.mark.usefixtures("openmp_as_usual")
def test_threads_with_a_cpu_each_are_left_alone() -> None:
    assert spins(1, {}, rests=False) == [[True, True, True]]


@pytest.mark.long
def test_actively_waiting_threads_wait_briefly_too() -> None:
    with ranks_with(OMP_NUM_THREADS=str(CPUS), OMP_WAIT_POLICY="active"):
        assert spins(2, {}) == [[True, False, True]] * 2
