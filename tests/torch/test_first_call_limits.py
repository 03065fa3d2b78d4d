# SPDX-License-Identifier: Apache-2.0
"""Waits while a group is made: fastcoll's limit holds, the late rank is named, Ctrl-C is heard."""

import os
import re
import signal
import threading
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.bootstrap import exchange
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.nodes.carriers import make_lane
from fastcoll.nodes.verdict.store import PollingStore
from tests.contract.test_init import launched
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt
from tests.support.launched import free_port

FreshPool = Callable[[int, Setup], Pool]
LIMIT_S = 1.0


def sum_in(group: Any = None) -> float:
    tensor = torch.ones(3)
    fastcoll.all_reduce(tensor, group=group)
    return tensor[0].item()


def first_call(name: str) -> None:
    """Make the first call of fastcoll on Gloo's group, with a limit of its own where it has one."""
    tensor, limit = torch.ones(4), {"timeout_s": LIMIT_S}
    if name == "init":
        fastcoll.init(dist.group.WORLD, **limit)
    elif name == "empty":  # has no limit of its own
        with unittest.mock.patch.dict(os.environ, FASTCOLL_TIMEOUT_S=str(LIMIT_S)):
            fastcoll.empty(3)
    elif name == "monitored_barrier":
        fastcoll.monitored_barrier(timeout=LIMIT_S)
    elif name == "all_reduce_coalesced":
        fastcoll.all_reduce_coalesced([tensor], **limit)
    elif name == "reduce_scatter_tensor":
        fastcoll.reduce_scatter_tensor(tensor[:2], tensor, **limit)
    elif name == "recv":
        fastcoll.recv(tensor, 1, **limit)
    elif name == "group=":
        fastcoll.all_reduce(tensor, group=dist.group.WORLD, **limit)
    else:
        getattr(fastcoll, name)(*([] if name == "new_group" else [tensor]), **limit)


def without_rank_1(rank: Rank, name: str) -> tuple[Attempt, float, float]:
    """Rank 1 comes when rank 0 has given up; then both use fastcoll and Gloo."""
    # Gloo's own limit is half an hour.
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)
    found = attempt(lambda: None)
    if rank.rank == 1:
        rank.wait_for("gave up")
    else:
        found = attempt(first_call, name)
        rank.tell("gave up")
    theirs = torch.ones(3)
    dist.all_reduce(theirs)
    return found, sum_in(), theirs[0].item()


def check(found: Attempt) -> None:
    assert found.kind == "CollectiveTimeout", found
    assert found.ranks == (1,)
    assert re.search(r"rank 1|ranks \[1\]", found.text), found
    assert found.seconds < LIMIT_S + LATE_S


CALLS = [
    "all_reduce",
    "init",
    "new_group",
    "empty",
    "group=",
    "monitored_barrier",
    "all_reduce_coalesced",
    "reduce_scatter_tensor",
    "recv",
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "nodes"), [*((name, "") for name in CALLS), ("all_reduce", "ab"), ("init", "ab")]
)
def test_a_call_on_a_foreign_group_ends_at_its_limit(
    fresh_pool: FreshPool, name: str, nodes: str
) -> None:
    pool = fresh_pool(2, Setup(init=False, nodes=nodes))
    (found, *sums), (_, *others) = pool.run(without_rank_1, name)
    check(found)
    assert sums == others == [2.0, 2.0]


def without_store(rank: Rank, name: str) -> tuple[Attempt, float]:
    with unittest.mock.patch.object(exchange, "_usable_store", lambda _: None):
        dist.init_process_group(
            "gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size
        )
        found = attempt(lambda: None)
        if name == "late" and rank.rank == 0:
            found = attempt(first_call, "all_reduce")
            rank.tell("gave up")
        elif name == "late":
            rank.wait_for("gave up")
        else:
            found = attempt(first_call, "all_reduce")
        return found, 0.0 if name == "late" else sum_in()


def test_a_group_without_a_store_is_made_by_its_own_collective(fresh_pool: FreshPool) -> None:
    assert [
        (found.kind, total)
        for found, total in fresh_pool(2, Setup(init=False)).run(without_store, "in time")
    ] == [("", 2.0)] * 2


def test_a_group_without_a_store_ends_at_the_limit_too(fresh_pool: FreshPool) -> None:
    (found, _), _ = fresh_pool(2, Setup(init=False)).run(without_store, "late")
    assert found.kind == "CollectiveTimeout", found
    assert "no other call of that process group" in found.text
    assert found.seconds < LIMIT_S + LATE_S


# ---- the launcher's store ------------------------------------------------------------------------


def launched_without(rank: Rank, late: int, port: int) -> Attempt:
    launched(rank, port)
    if rank.rank == late:
        rank.wait_for("gave up")
        return attempt(lambda: None)
    found = attempt(fastcoll.init, timeout_s=LIMIT_S)
    rank.tell("gave up")
    return found


@pytest.mark.parametrize("late", [0, 1])
def test_init_names_who_did_not_come_to_the_store(fresh_pool: FreshPool, late: int) -> None:
    outcomes = fresh_pool(2, Setup(init=False)).run(launched_without, late, free_port())
    found = outcomes[1 - late]
    assert found.kind == "CollectiveTimeout", found
    assert found.ranks == (late,)
    assert found.seconds < LIMIT_S + LATE_S


# ---- Ctrl-C --------------------------------------------------------------------------------------


def wait_in_init(way: str) -> None:
    if way == "gloo":
        fastcoll.init(dist.group.WORLD)
    elif way == "call":
        fastcoll.all_reduce(torch.ones(3), group=dist.group.WORLD)
    else:
        fastcoll.init()


def be_interrupted(rank: Rank, way: str, late: int, port: int) -> tuple[Attempt, float]:
    """One rank waits in init for the late one and gets a Ctrl-C; then both come."""
    if way == "launcher":
        launched(rank, port)
    else:
        dist.init_process_group(
            "gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size
        )
    found = attempt(lambda: None)
    if rank.rank == late:
        rank.wait_for("gave up")
    else:
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
        found = attempt(wait_in_init, way)
        rank.tell("gave up")
    fastcoll.destroy()
    wait_in_init(way)
    return found, sum_in()


@pytest.mark.parametrize(
    ("way", "late"), [("launcher", 0), ("launcher", 1), ("gloo", 1), ("call", 1)]
)
def test_ctrl_c_is_heard_at_once(fresh_pool: FreshPool, way: str, late: int) -> None:
    outcomes = fresh_pool(2, Setup(init=False)).run(be_interrupted, way, late, free_port())
    found, _ = outcomes[1 - late]
    assert found.kind == "KeyboardInterrupt", found
    assert found.seconds < LATE_S
    assert [total for _, total in outcomes] == [2.0, 2.0]


def interrupt_a_connecting_carrier(rank: Rank) -> Attempt:
    """A carrier that connects in C++ asks nobody for signals."""

    def make(*_: Any) -> Any:
        return dist.HashStore().get("what nobody sets")

    store = PollingStore(dist.HashStore(), "lane", Deadline(20.0), lambda: None, (0,), 0)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    return attempt(make_lane, make, store, 0, 1)


def test_ctrl_c_is_heard_while_a_carrier_connects(fresh_pool: FreshPool) -> None:
    [found] = fresh_pool(1, Setup(init=False)).run(interrupt_a_connecting_carrier)
    assert found.kind == "KeyboardInterrupt", found
    assert found.seconds < LATE_S


# ---- groups of fastcoll's own --------------------------------------------------------------------


def use_after_close(rank: Rank) -> Attempt:
    dist.init_process_group("fastcoll", store=rank.store, rank=rank.rank, world_size=2)
    sum_in(dist.group.WORLD)
    fastcoll.init()
    fastcoll.destroy()
    return attempt(sum_in, dist.group.WORLD)


def test_a_closed_group_is_not_made_anew(fresh_pool: FreshPool) -> None:
    for found in fresh_pool(2, Setup(init=False)).run(use_after_close):
        assert found.kind == "UsageError", found
        assert "was destroyed" in found.text
