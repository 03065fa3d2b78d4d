# SPDX-License-Identifier: Apache-2.0
"""A rank that dies or fails at some step while a group is made is named on all others, in time."""

import os
import signal
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest

import fastcoll
from fastcoll.bootstrap import rendezvous
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt

LIMIT_S = 30.0
LOST, LATE = ("PeerLostError",), ("CollectiveTimeout",)
# Of a step, the function with which it begins, in the order in which a rank comes to them.
STEPS = {
    "introduction": "fastcoll.bootstrap.join.describe_rank",
    "exchange": "fastcoll.bootstrap.exchange.StoreExchange.gather",
    "connections": "fastcoll.bootstrap.rendezvous.Listener.connect",
    "call": "fastcoll.bootstrap.rendezvous._call",
    "greeting": "fastcoll.bootstrap.rendezvous._send_token",
    "reply": "fastcoll.bootstrap.rendezvous._read_reply",
    "descriptors": "fastcoll.bootstrap.mesh.Mesh.exchange_fds",
    "region": "fastcoll.api.making.create_region",
    "lanes": "fastcoll.nodes.making.make_lane",
    "first byte": "fastcoll.nodes.making._Making._greet",
    "barrier": "fastcoll.barrier",
}


def stumble(rank: Rank, victim: int, step: str, how: str, limit_s: float) -> Attempt:
    """One rank dies, or fails, at a step of new_group(), or of init() if there is no group yet."""

    def fail(*_: Any) -> Any:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        patch.stop()
        raise ValueError("the test says so")

    patch = unittest.mock.patch(STEPS[step], fail)
    world = rank.world_size
    if rank.rank == victim:
        patch.start()
    if rank.comm is not None:
        return attempt(rank.comm.new_group, timeout_s=limit_s)
    for peer in range(world) if rank.rank == victim else ():
        if peer != victim:  # at the limit, nobody else is missing
            rank.wait_for(f"fastcoll/world/{world}/hello/1/{peer}")
    options = {"rank": rank.rank, "world_size": world, "timeout_s": limit_s}
    found = attempt(fastcoll.init, store=rank.store, **options)
    return found if found.kind else attempt(fastcoll.barrier)


def check(pool: Pool, victim: int, step: str, how: str, kinds: tuple[str, ...]) -> list[Attempt]:
    """Let a rank stumble; return what the others were told."""
    limit_s = LIMIT_S if kinds == LOST else 2.0
    outcomes = pool.outcomes(stumble, victim, step, how, limit_s)
    odd = outcomes.pop(victim)
    if how == "dies":
        assert odd.exit_code == -signal.SIGKILL, odd.describe()
    else:
        assert odd.value.kind == "ValueError", odd
    found: list[Attempt] = [outcome.value for outcome in outcomes]
    for one in found:
        assert one.kind in kinds, one
        assert one.ranks == (victim,), one
        assert one.seconds < LATE_S + (limit_s if kinds != LOST else 0), one
    return found


NOT_IN_INIT = "connections", "region", "lanes", "first byte"


@pytest.mark.parametrize("step", [step for step in STEPS if step not in NOT_IN_INIT])
def test_death_in_init(fresh_pool: Callable[..., Pool], step: str) -> None:
    """A rank that dies before it is known is missing at the limit."""
    check(fresh_pool(3, Setup(init=False)), 1, step, "dies", LOST + LATE)


@pytest.mark.parametrize("nodes", ["", pytest.param("baa", marks=pytest.mark.slow)])
def test_death_in_new_group_is_seen_by_those_who_wait_for_a_connection(
    fresh_pool: Callable[..., Pool], nodes: str
) -> None:
    """Nobody calls at the last rank's door, so nobody hears there that it is gone."""
    check(fresh_pool(3, Setup(nodes=nodes)), 2, "connections", "dies", LOST)


@pytest.mark.long
@pytest.mark.parametrize("how", ["dies", "fails"])
@pytest.mark.parametrize("step", ["call", "region", "lanes", "first byte"])
def test_all_nodes_hear_the_same(fresh_pool: Callable[..., Pool], step: str, how: str) -> None:
    found = check(fresh_pool(4, Setup(nodes="aabb")), 3, step, how, LOST)
    assert len({one.text for one in found}) == 1


@pytest.mark.parametrize("step", ["region", "lanes", "first byte"])
def test_a_node_whose_only_rank_fails_tells_the_others(
    fresh_pool: Callable[..., Pool], step: str
) -> None:
    """Nobody else of its node could."""
    found = check(fresh_pool(3, Setup(nodes="aab")), 2, step, "fails", LOST)
    assert len({one.text for one in found}) == 1


def test_a_node_that_dies_in_its_lane_is_lost_at_once(fresh_pool: Callable[..., Pool]) -> None:
    """Those whose connection to it breaks are not taken for lost, nor one that waits for them."""
    check(fresh_pool(4, Setup(nodes="abcd")), 3, "first byte", "dies", LOST)


@pytest.mark.parametrize("step", ["connections", pytest.param("lanes", marks=pytest.mark.slow)])
def test_a_node_that_does_not_come_is_named_at_the_limit(
    fresh_pool: Callable[..., Pool], step: str
) -> None:
    """It had one rank, so that nobody knows what became of it."""
    for one in check(fresh_pool(3, Setup(nodes="aab")), 2, step, "dies", LATE):
        assert "node 1" in one.text


def give_up_on_rank_1(rank: Rank, quitter: int, step: str, slow: int, late_s: float) -> Attempt:
    """One rank finds that rank 1 is lost, at some step of init; another one comes late."""

    def give_up(*_: Any) -> None:
        patch.stop()
        time.sleep(0.2)
        raise fastcoll.PeerLostError("rank 1 hung up", [1])

    patch = unittest.mock.patch(GIVING_UP[step], give_up)
    if rank.rank == quitter:
        patch.start()
    call = rendezvous._call

    def call_late(*args: Any) -> Any:
        time.sleep(late_s)
        return call(*args)

    if rank.rank == slow:
        rendezvous._call = call_late
    options = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 12.0}
    one = attempt(fastcoll.init, store=rank.store, **options)
    return one if one.kind else attempt(fastcoll.barrier)


GIVING_UP = {
    "greet": STEPS["greeting"],
    "reply": STEPS["reply"],
    "send": "fastcoll.bootstrap.mesh.Mesh._send",
    "receive": "fastcoll.bootstrap.mesh.Mesh._ready",
}


@pytest.mark.parametrize(
    ("quitter", "step", "slow", "late_s"),
    [
        (0, "greet", 2, 0.5),  # rank 0 still stands at its door
        (0, "greet", 2, 2.5),  # it is gone, and left its reason in the store
        (0, "greet", -1, 0),
        pytest.param(2, "greet", -1, 0, marks=pytest.mark.slow),  # rank 1 waits to its limit
        (2, "reply", -1, 0),
        (0, "send", -1, 0),
        (0, "receive", -1, 0),
        (2, "receive", -1, 0),
    ],
)
def test_who_gives_up_in_init_says_why(
    fresh_pool: Callable[..., Pool], quitter: int, step: str, slow: int, late_s: float
) -> None:
    """A rank that leaves because of another one is not taken for the culprit."""
    pool = fresh_pool(3, Setup(init=False))
    for outcome in pool.outcomes(give_up_on_rank_1, quitter, step, slow, late_s):
        assert outcome.ok, outcome.describe()
        if outcome.rank != 1:
            assert outcome.value.kind == "PeerLostError", outcome.value
            assert outcome.value.ranks == (1,), outcome.value
            assert outcome.value.seconds < LATE_S
