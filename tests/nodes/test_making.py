# SPDX-License-Identifier: Apache-2.0
"""Lanes between nodes are made by all their ranks or by none, and within their limit.

That a rank that dies or fails while a group is made is named stands in faults/test_making.py.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

import fastcoll
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt

LIMIT_S = 30.0
FreshPool = Callable[[int, Setup], Pool]


def dawdle(rank: Rank, victim: int, slow: int, before: str, limit_s: float) -> tuple[Attempt, bool]:
    """One rank fails; another one is slow on its way into a lane of which the victim is none.

    Returns:
        The outcome of the call, and whether this rank's lane was made.
    """
    from fastcoll.nodes import carriers, making

    usual, made = carriers.CARRIERS["gloo"], []

    def gloo(*args: Any) -> Any:
        if rank.rank == slow and before == "connecting":
            time.sleep(1)  # a verdict is known by then
        made.append(usual(*args))
        return made[0]

    def make_lane(*args: Any) -> Any:
        if rank.rank == victim:
            time.sleep(0.2)
            raise ValueError("the test says so")
        if rank.rank == slow and before == "coming":
            time.sleep(1)
        return carriers.make_lane(*args)

    carriers.CARRIERS["gloo"], making.make_lane = gloo, make_lane  # type: ignore[assignment]
    try:
        return attempt(rank.comm.new_group, timeout_s=limit_s), bool(made)
    finally:
        carriers.CARRIERS["gloo"], making.make_lane = usual, carriers.make_lane


@pytest.mark.long
@pytest.mark.parametrize("before", ["coming", "connecting"])
@pytest.mark.parametrize("slow", [0, 2])
def test_ranks_of_a_lane_connect_together_or_not_at_all(
    fresh_pool: FreshPool, slow: int, before: str
) -> None:
    """Else Gloo, which hears of nothing, would wait for a rank that heard of an error and left."""
    outcomes = fresh_pool(4, Setup(nodes="aabb")).run(dawdle, 3, slow, before, LIMIT_S)
    for one, _ in outcomes[:3]:
        assert (one.kind, one.ranks) == ("PeerLostError", (3,)), one
        assert one.seconds < LATE_S, one
    made = [made for _, made in outcomes]
    assert made[0] == made[2], outcomes
    assert not (made[1] or made[3]), outcomes


def connect_slowly(rank: Rank) -> bool:
    """Rank 2 notices late that it is connected; return whether it has when this group is made."""
    from fastcoll.nodes import carriers

    usual, made = carriers.CARRIERS["gloo"], []

    def gloo(*args: Any) -> Any:
        made.append(usual(*args))
        time.sleep(0.5)
        rank.tell(f"rank 2 has {len(made)} lanes")
        return made[-1]

    if rank.rank == 2:
        carriers.CARRIERS["gloo"] = gloo
    try:
        rank.comm.new_group().close()
    finally:
        carriers.CARRIERS["gloo"] = usual
    return bool(rank.store.check(["rank 2 has 2 lanes"]))


def test_a_rank_has_its_group_when_all_have_their_lanes(fresh_pool: FreshPool) -> None:
    """Else it might leave, and break a connection that another rank is about to have."""
    assert fresh_pool(3, Setup(nodes="aab")).run(connect_slowly) == [True] * 3


def join_by(rank: Rank, culprit: int) -> Attempt:
    """One rank is told a network interface that its machine does not have."""
    if rank.rank == culprit:
        os.environ["GLOO_SOCKET_IFNAME"] = "no-such"
    where = {"store": rank.store, "rank": rank.rank, "world_size": rank.world_size}
    return attempt(fastcoll.init, **where, timeout_s=LIMIT_S)


@pytest.mark.parametrize(("culprit", "node"), [(0, 0), (2, 1)])
def test_a_wrong_network_interface_is_told_to_all(
    fresh_pool: FreshPool, culprit: int, node: int
) -> None:
    """Ranks of other nodes were named, which had come."""
    for one in fresh_pool(3, Setup(nodes="aab", init=False)).run(join_by, culprit):
        assert one.kind == "DriverError", one
        assert one.text.startswith(f"node {node} ("), one
        assert "GLOO_SOCKET_IFNAME" in one.text, one
        assert "no-such" in one.text, one
        assert one.seconds < LATE_S, one


def test_gloo_does_not_wait_longer_for_a_connection_than_it_may() -> None:
    """Gloo waits five times its limit for a rank that said where it is, and never came."""
    from fastcoll.bootstrap.deadline import Deadline
    from fastcoll.nodes.carriers.torch import gloo
    from fastcoll.nodes.verdict.store import PollingStore

    limit_s = 2.0
    shared = HashStore()

    class Leaves(PollingStore):
        def wait(self, *_: Any) -> None:
            raise RuntimeError("the test says so")

    came = threading.Event()
    here = shared, "lane", Deadline(LATE_S), came.set, (0, 1), 0
    seconds = []

    def wait() -> None:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="onnect"):
            gloo(PollingStore(*here), 0, 2, limit_s)
        seconds.append(time.monotonic() - start)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert came.wait(LATE_S)
    with pytest.raises(RuntimeError, match="the test says so"):
        gloo(Leaves(*here), 1, 2, limit_s)
    waiting.join()
    assert limit_s <= seconds[0] < 4 * limit_s
