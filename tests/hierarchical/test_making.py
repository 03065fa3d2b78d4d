# SPDX-License-Identifier: Apache-2.0
"""A rank that dies or fails while a group over nodes is made is lost to all nodes, at once."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from harness import LATE_S, Attempt, Pool, Rank, Setup, attempt

LIMIT_S = 30.0
FreshPool = Callable[[int, Setup], Pool]


def stumble(rank: Rank, victim: int, step: str, how: str, limit_s: float) -> Attempt:
    """One rank dies, or fails, at some step of new_group()."""
    from fastcoll import communicator
    from fastcoll.bootstrap import rendezvous
    from fastcoll.hierarchical import making

    places: dict[str, tuple[Any, str]] = {
        "introduced": (rendezvous.Listener, "connect"),
        "door": (rendezvous, "_call"),
        "region": (communicator, "create_region"),
        "lanes": (making, "make_lane"),
    }
    usual = getattr(*places[step])

    def fail(*_: Any) -> Any:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(*places[step], usual)
        raise ValueError("the test says so")

    if rank.rank == victim:
        setattr(*places[step], fail)
    return attempt(rank.comm.new_group, timeout_s=limit_s)


@pytest.mark.parametrize("how", ["dies", "fails"])
@pytest.mark.parametrize("step", ["door", "region", "lanes"])
def test_who_does_not_get_through_is_named_on_all_nodes(
    fresh_pool: FreshPool, step: str, how: str
) -> None:
    pool = fresh_pool(4, Setup(nodes="aabb"))
    *others, last = pool.outcomes(stumble, 3, step, how, LIMIT_S)
    if how == "dies":
        assert last.exit_code == -signal.SIGKILL
    else:
        assert last.value.kind == "ValueError", last
    for one in (outcome.value for outcome in others):
        assert one.kind == "PeerLostError", one
        assert one.ranks == (3,), one
        assert one.text == others[0].value.text
        assert one.seconds < LATE_S, one


@pytest.mark.parametrize("step", ["introduced", "lanes"])
def test_a_node_that_does_not_come_is_named_at_the_limit(fresh_pool: FreshPool, step: str) -> None:
    """It had one rank, so that nobody knows what became of it."""
    *others, _ = fresh_pool(3, Setup(nodes="aab")).outcomes(stumble, 2, step, "dies", 3.0)
    for one in (outcome.value for outcome in others):
        assert one.kind == "CollectiveTimeout", one
        assert one.ranks == (2,), one
        assert "node 1" in one.text
