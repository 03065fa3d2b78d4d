# SPDX-License-Identifier: Apache-2.0
"""The time of day jumps, by days, forward and back: no wait is cut short, and none becomes longer.

The ranks' clocks are those of jumping_clock.c, each rank's its own.
"""

import ctypes
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.environment import ranks_with
from tests.support.fault_places import Place, Story, check_fault, live_through
from tests.support.faults import FAULTS, Scene
from tests.support.harness import (
    DEADLINE_S,
    LATE_S,
    TIMEOUT_S,
    Pool,
    Rank,
)
from tests.support.programs import need, run
from tests.support.sites import Site, across

SOURCE = Path(__file__).with_name("jumping_clock.c")
DAYS_S = (-20_000 * 86_400, -86_400, 86_400, 4_000 * 86_400)
WORLD = 3
pytestmark = pytest.mark.native


@pytest.fixture(scope="module", autouse=True)
def clocks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    need("gcc")
    library = tmp_path_factory.mktemp("clock") / "jumping_clock.so"
    done = run(
        ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", str(SOURCE), "-o", str(library)], 60
    )
    assert done.returncode == 0, done.stdout
    with ranks_with(LD_PRELOAD=str(library)):
        yield


@pytest.fixture(params=[Site(WORLD), across("aab")], ids=["one node", "two nodes"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    pool = Place(request.param, (1,)).start()
    yield request.param.on(pool)
    pool.close()


@contextmanager
def jumping(seed: int) -> Iterator[None]:
    """Let this process's time of day jump, some ten times a second."""
    clock = ctypes.CDLL(os.environ["LD_PRELOAD"])
    at_end = threading.Event()
    draw = random.Random(seed)

    def jump() -> None:
        while not at_end.wait(draw.uniform(0.01, 0.2)):
            clock.set_clock_ahead(ctypes.c_long(draw.choice(DAYS_S)))

    thread = threading.Thread(target=jump)
    thread.start()
    try:
        yield
    finally:
        at_end.set()
        thread.join()
        clock.set_clock_ahead(ctypes.c_long(0))


def wait_by_the_time_of_day(rank: Rank) -> float:
    began = time.monotonic()
    with jumping(rank.rank):
        end = time.time() + DEADLINE_S / 2
        while time.time() < end and time.monotonic() < began + DEADLINE_S / 2:
            time.sleep(0.001)
    return time.monotonic() - began


def test_a_wait_by_the_time_of_day_would_be_cut_short() -> None:
    pool = Pool(WORLD)
    assert max(pool.run(wait_by_the_time_of_day)) < LATE_S
    pool.close()


def call_on(rank: Rank, seconds: float) -> int:
    """A bit of everything, some of it waited for; returns how many turns."""
    comm, me, world = rank.comm, rank.rank, rank.world_size
    total = sum(range(world))
    turns = 0
    with jumping(rank.rank):
        is_over = torch.zeros(1)
        end = time.monotonic() + seconds
        while not is_over:
            turns += 1
            if turns % 10 == me:
                time.sleep(0.1)
            for numel in (3, 60_000):
                tensor = torch.full((numel,), float(me))
                comm.all_reduce(tensor)
                assert (tensor == total).all()
                work = comm.all_reduce(tensor, async_op=True)
                assert work.wait(TIMEOUT_S)
                assert (tensor == total * world).all()
            got = torch.zeros(2)
            works = [
                comm.isend(torch.full((2,), float(me)), (me + 1) % world),
                comm.irecv(got, (me - 1) % world),
            ]
            for one in works:
                one.wait()
            assert (got == (me - 1) % world).all()
            if turns % 10 == 5:
                group = comm.new_group()
                group.barrier()
                group.close()
            is_over.fill_(time.monotonic() > end)
            comm.broadcast(is_over, 0)
    return turns


def test_calls_go_on(site: Site) -> None:
    assert site.pool is not None
    turns = site.pool.run(call_on, 3.0)
    assert min(turns) == max(turns) > 10


def wait_for_rank_1(rank: Rank, *scene: Any) -> Story:
    """See the clock jump while the others wait; the store's own waits go by the time of day."""
    make_all = Scene.make_all

    def make_all_meanwhile(*args: Any) -> Any:
        with jumping(rank.rank):
            return make_all(*args)

    with mock.patch.object(Scene, "make_all", make_all if rank.rank == 1 else make_all_meanwhile):
        return live_through(rank, *scene)


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_always(site: Site) -> None:
    assert site.pool is not None
    place = Place(site, (1,))
    site.pool.start(wait_for_rank_1, "late", (1,), place.waits(FAULTS["late"]), "late")
    outcomes = site.pool.collect()
    check_fault(place, "late", outcomes)
    for rank in place.others():
        for row in outcomes[rank].value.rows.values():
            ages = re.findall(r"([\d.]+) s ago", row[0].text)
            assert all(float(age) < DEADLINE_S for age in ages)
