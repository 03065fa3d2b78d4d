# SPDX-License-Identifier: Apache-2.0
"""The survivors of a group over several nodes go on: after a death, of a node too, and an abort."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, Store

import fastcoll
from fastcoll.bootstrap.node_map import NodeMap, Seat
from fastcoll.nodes.survivors import Survivors, _Nodes
from fastcoll.nodes.verdict.board import Board
from tests.support.harness import DEADLINE_S, Pool, Rank, Setup, attempt

LIMIT_S = 4.0
FreshPool = Callable[[int, Setup], Pool]


def cluster(fresh_pool: FreshPool, nodes: str) -> Pool:
    return fresh_pool(len(nodes), Setup(nodes=nodes, timeout_s=LIMIT_S))


def use(group: Any) -> list[Any]:
    """Calls of each kind of path, and who says that it is here."""
    for numel in (1, 5000, 300_000):
        tensor = torch.ones(numel)
        group.all_reduce(tensor)
        assert (tensor == group.world_size).all()
    part = group.new_group()
    part.barrier()
    part.close()
    ranks = [row[0] for row in group.gather_words([group.rank])]
    return [type(group).__name__, group.name, group.rank, ranks]


def until_lost(rank: Rank, numel: int) -> list[Any]:
    while not (found := attempt(rank.comm.all_reduce, torch.ones(numel))).kind:
        pass
    group: Any = fastcoll.shrink()
    fastcoll.all_reduce(torch.ones(2))  # of the default group, which is the new one
    nodes = getattr(group, "node_map", None) and group.node_map.nodes
    return [found.kind, nodes, *use(group)]


@pytest.mark.slow
def test_a_stopped_node_is_left_out_and_told(fresh_pool: FreshPool) -> None:
    pool = cluster(fresh_pool, "aabb")
    pool.start(until_lost_or_out, 8)
    time.sleep(0.5)
    for victim in (2, 3):
        os.kill(pool.pids[victim], signal.SIGSTOP)
    for one in pool.collect(ranks=[0, 1]):
        kind, _, *rest = one.value
        assert kind == "CollectiveTimeout"
        assert rest == ["Communicator", "world, node 0:1", one.rank, [0, 1]]
    for victim in (2, 3):
        os.kill(pool.pids[victim], signal.SIGCONT)
    for one in pool.collect(ranks=[2, 3]):
        assert one.value[0] == "PeerLostError"
        assert "went on without node 1" in one.value[1]


def lose_a_leader(rank: Rank) -> Any:
    """Rank 0 dies when its node has agreed, before it says so to the other one."""
    if rank.rank == 0:
        _Nodes.decide = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        group = rank.comm.shrink(timeout_s=1)
    except RuntimeError as error:
        return type(error).__name__
    return use(group)


@pytest.mark.slow
def test_a_leader_that_dies_while_nodes_agree_costs_its_node(fresh_pool: FreshPool) -> None:
    _, second, *others = cluster(fresh_pool, "aabb").outcomes(lose_a_leader)
    assert second.value == "PeerLostError", second
    for rank, one in enumerate(others):
        assert one.ok, one.describe()
        assert one.value[2:] == [rank, [0, 1]], one


def until_lost_or_out(rank: Rank, numel: int) -> list[Any]:
    found = []
    try:
        found = until_lost(rank, numel)
    except RuntimeError as error:
        found = [type(error).__name__, str(error)]
    return found


MAP = NodeMap(((0, 1), (2,), (3,)), ("a", "b", "c"), ("a", "b", "c"))


def leaders(coming: dict[int, list[int]], lost: list[int], limit_s: float) -> list[Survivors]:
    """Return what the leaders of some nodes agree on, each in a thread."""
    store = HashStore()
    found: list[Survivors] = []

    def lead(node: int, left: list[int]) -> None:
        board = Board(store, "nonce")
        found.append(_Nodes(board, MAP, lost, limit_s).decide(node, left))

    threads = [threading.Thread(target=lead, args=one) for one in coming.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_nodes_that_come_all_go_on() -> None:
    first, *others = leaders({0: [1], 1: [2], 2: [3]}, [0], limit_s=60)
    assert first.ranks == [1, 2, 3]
    assert all(other == first for other in others)
    assert first.node_map(MAP) == NodeMap(((0,), (1,), (2,)), ("a", "b", "c"), ("a", "b", "c"))


@pytest.mark.parametrize(("store_rank", "after"), [(None, None), (0, None), (2, 1)])
def test_a_seat_after_a_shrink_knows_who_serves_the_store(
    store_rank: int | None, after: int | None
) -> None:
    survivors = Survivors([1, 2, 3], "new")
    seat = survivors.seat(Seat(MAP, 3, "old", store_rank))
    assert seat == Seat(survivors.node_map(MAP), 2, "new", after)


def test_a_node_that_does_not_come_is_waited_for_to_the_limit() -> None:
    start = time.monotonic()
    found = leaders({0: [0, 1], 2: [3]}, [], limit_s=0.5)
    assert time.monotonic() - start >= 0.5
    assert [one.ranks for one in found] == [[0, 1, 3]] * 2
    assert found[0].node_map(MAP) == NodeMap(((0, 1), (2,)), ("a", "c"), ("a", "c"))


class Stopped(Board):
    """Of a leader that is stopped when it is about to say who goes on."""

    def __init__(self, store: Store, nonce: str) -> None:
        super().__init__(store, nonce)
        self.is_stopped, self.goes_on = threading.Event(), threading.Event()

    def write_first(self, key: str, text: str, limit_s: float) -> str | None:
        self.is_stopped.set()
        assert self.goes_on.wait(DEADLINE_S)
        return super().write_first(key, text, limit_s)


class Overwriting(Stopped):
    """It does not look whether somebody has said so meanwhile."""

    def write_first(self, key: str, text: str, limit_s: float) -> str | None:
        super().write_first(f"not {key}", text, limit_s)
        self.say(key, text, limit_s)
        return text


@pytest.mark.parametrize(("kind", "is_one"), [(Stopped, True), (Overwriting, False)])
def test_a_leader_that_comes_back_hears_the_answer(kind: type[Stopped], is_one: bool) -> None:
    """It had found, by its clock, that no other node comes."""
    store, found = HashStore(), list[Survivors]()
    board = kind(store, "nonce")
    late = _Nodes(board, MAP, [], limit_s=0)
    thread = threading.Thread(target=lambda: found.append(late.decide(2, [3])))
    thread.start()
    assert board.is_stopped.wait(DEADLINE_S)
    answer = _Nodes(Board(store, "nonce"), MAP, [], limit_s=0).decide(0, [0, 1])
    board.goes_on.set()
    thread.join()
    assert answer.ranks == [0, 1, 3]
    assert (found == [answer]) is is_one
