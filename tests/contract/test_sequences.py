# SPDX-License-Identifier: Apache-2.0
"""Sequences of calls: what goes wrong between two calls, not in one.

Decides the sequences: random ones with a pause of its own on each rank, long ones without any
pause, with more ranks than CPUs.
"""

import os
import random
import time
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastcoll
from tests.support import oracle
from tests.support.calls import MOVES, REDUCTIONS, ROOTED, Call, Place, mixed
from tests.support.draw import IN_ANY_ORDER, algorithms_of
from tests.support.harness import Pools, Rank
from tests.support.perform import Result, Started, check

# Of each world, new ones in every run.
NUM_RANDOM = int(os.environ.get("TEST_SEQUENCES", "40"))
PAUSES_S = (0.0, 0.0, 0.0, 0.0002, 0.002)


@st.composite
def one_place(draw: st.DrawFn) -> Place:
    kinds = st.sampled_from(["private", "symmetric", "strided"])
    kind, offsets = draw(kinds), st.integers(0, 17)
    in_place = kind != "strided" and draw(st.booleans())
    output = None if in_place else Place(draw(kinds), draw(offsets))
    return Place(kind, draw(offsets), in_place, output)


@st.composite
def one_call(draw: st.DrawFn, world: int) -> Call:
    verb = draw(st.sampled_from([*REDUCTIONS, *MOVES]))
    dtype = draw(st.sampled_from(oracle.DTYPES))
    op = draw(st.sampled_from(oracle.ops_of(dtype))) if verb in REDUCTIONS else "SUM"
    algorithm = "auto"
    if verb in REDUCTIONS:
        barred = IN_ANY_ORDER if oracle.order_matters(dtype, op) else []
        ways = [way for way in algorithms_of(verb) if way not in barred]
        algorithm = draw(st.sampled_from(ways))
    sizes = st.one_of(st.integers(0, 20), st.integers(0, 3000), st.integers(30_000, 120_000))
    places = draw(st.lists(one_place(), min_size=1, max_size=world))
    root = draw(st.integers(0, world - 1)) if verb in ROOTED else 0
    seed = draw(st.integers(0, 9999))
    return Call(verb, dtype, draw(sizes), op, algorithm, None, root, tuple(places), seed)


def with_pauses(rank: Rank, calls: list[Call], seed: int) -> list[Result]:
    own = random.Random(seed * 64 + rank.rank)
    results = []
    for call in calls:
        time.sleep(own.choice(PAUSES_S))
        results.append(Started(rank.comm, call).result())
    return results


def under_way(rank: Rank, calls: list[Call], seed: int) -> list[Result]:
    """Up to three calls at a time; what is asynchronous, waited for and asked for, and when, each
    rank decides for itself."""
    for call in calls:  # the calls of a kind but the first are C++'s
        Started(rank.comm, call).result()
    own = random.Random(seed * 64 + rank.rank)
    started: deque[Started] = deque()
    results: list[Result] = []

    def finish(but: int) -> None:
        while len(started) > but:
            results.append(started.popleft().result())

    for call in calls:
        time.sleep(own.choice(PAUSES_S))
        shares_memory = any("symmetric" in place.kinds for place in call.places)
        finish(0 if shares_memory else own.randrange(3))
        started.append(Started(rank.comm, call, async_op=own.random() < 0.8))
        if started[0].work is not None and own.random() < 0.3:
            started[0].work.is_completed()
        if shares_memory:
            finish(0)
    finish(0)
    return results


def sequences(world: int) -> st.SearchStrategy[list[Call]]:
    return st.lists(one_call(world), min_size=2, max_size=6)


def fuzz(pools: Pools, world: int, examples: int, fixed: bool, perform: Any = with_pauses) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=fixed,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(sequences(world), st.integers(0, 1000))
    def run(calls: list[Call], seed: int) -> None:
        check(pools(world), calls, perform=partial(perform, seed=seed))

    run()


WORLDS = (2, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4)))


@pytest.mark.parametrize("world", WORLDS)
def test_random_sequences(pools: Pools, world: int) -> None:
    fuzz(pools, world, 60, fixed=True)


@pytest.mark.parametrize("world", WORLDS)
def test_random_sequences_under_way(pools: Pools, world: int) -> None:
    fuzz(pools, world, 40, True, under_way)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("perform", [with_pauses, under_way])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_many_random_sequences(pools: Pools, world: int, perform: Any) -> None:
    fuzz(pools, world, NUM_RANDOM, False, perform)


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mixed_calls(pools: Pools, count: int) -> None:
    assert check(pools(3), mixed(3, count, 1), batch=2500) == count


def without_pause(rank: Rank, rounds: int, seed: int) -> str:
    """Calls on the library's shortest way, back to back; what was wrong first."""
    world, me = rank.world_size, rank.rank
    plan = random.Random(seed)
    one, few = torch.zeros(1), torch.zeros(700)
    whole, part = torch.zeros(world * 3), torch.zeros(3)
    ranks = torch.arange(float(world)).repeat_interleave(3)
    total = world * (world - 1) / 2
    for number in range(rounds):
        verb, root = plan.randrange(6), plan.randrange(world)
        if verb == 0:
            one.fill_(number + me)
            fastcoll.all_reduce(one)
            right = one.item() == world * number + total
        elif verb == 1:
            few.fill_(number + me)
            fastcoll.all_reduce(few)
            right = few[0].item() == few[-1].item() == world * number + total
        elif verb == 2:
            part.fill_(number + me)
            fastcoll.all_gather_into_tensor(whole, part)
            right = bool((whole == ranks + number).all())
        elif verb == 3:
            whole.copy_(ranks + number)
            fastcoll.reduce_scatter_tensor(part, whole)
            right = part[0].item() == part[-1].item() == world * (number + me)
        elif verb == 4:
            one.fill_(number if me == root else -1)
            fastcoll.broadcast(one, root)
            right = one.item() == number
        else:
            fastcoll.barrier()
            right = True
        if not right:
            return f"call {number}, verb {verb}: {one} {few[:1]} {part} {whole}"
    return ""


@pytest.mark.parametrize(
    ("world", "rounds"),
    [
        (8, 600),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 30_000), (4, 8000))),
    ],
)
def test_no_pause_between_calls(pools: Pools, world: int, rounds: int) -> None:
    assert pools(world).run(without_pause, rounds, world) == [""] * world
