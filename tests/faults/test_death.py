# SPDX-License-Identifier: Apache-2.0
"""Deaths that one node alone can have: what is known of the process, and what comes after.

That a killed peer is named in every call stands in test_every_fault.py, in init in test_making.py.
A peer that did its part first is no loss: test_every_fault.py and test_fault_points.py.
"""

import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastcoll
from tests.faults.test_fork import in_child
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt, make_group
from tests.support.waiting import wait_until, waits


def fork_then_wait(rank: Rank) -> list[Attempt]:
    """Rank 2 leaves a child behind that holds copies of all its sockets."""
    if rank.rank == 2:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        rank.comm.barrier()
        rank.tell("all are there")
        time.sleep(60)
    rank.comm.barrier()
    return [attempt(rank.comm.all_reduce, torch.ones(3)), attempt(rank.comm.barrier)]


def test_a_dead_peer_with_a_living_child(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(3)
    pool.start(fork_then_wait)
    pool.wait_for("all are there")
    time.sleep(0.5)
    os.kill(pool.pids[2], signal.SIGKILL)
    for outcome in pool.collect(ranks=(0, 1)):
        for one in outcome.value:
            assert (one.kind, one.ranks) == ("PeerLostError", (2,)), one
            assert one.seconds < LATE_S, one


# Ranks look at each other in their order: the busy one is awaited first, or alone.
DEAD_AND_BUSY = {"in the call": (0, 2), "before the call": (2, 0)}


def wait_for_another(rank: Rank, way: str) -> Attempt | None:
    """Rank 1 waits for a rank that computes, while another dies in the call or before it."""
    dead, busy = DEAD_AND_BUSY[way]
    rank.comm.all_reduce(torch.ones(3))
    if rank.rank == busy:
        rank.wait_for("over")
        return None
    if rank.rank == dead:
        rank.tell("the odd rank is there")
        if way == "before the call":
            time.sleep(60)
    one = attempt(rank.comm.all_reduce, torch.ones(100_000))
    rank.tell("over")
    return one


@pytest.mark.parametrize("way", DEAD_AND_BUSY)
def test_a_dead_peer_beside_one_that_is_awaited(fresh_pool: Callable[..., Pool], way: str) -> None:
    dead, busy = DEAD_AND_BUSY[way]
    pool = fresh_pool(3)
    pool.start(wait_for_another, way)
    pool.wait_for("the odd rank is there")
    wait_until(lambda: waits(pool.pids[1]) and (way != "in the call" or waits(pool.pids[dead])))
    os.kill(pool.pids[dead], signal.SIGKILL)
    [one] = [outcome.value for outcome in pool.collect(ranks=[1, busy]) if outcome.value]
    assert (one.kind, one.ranks) == ("PeerLostError", (dead,)), one
    assert one.seconds < LATE_S


CLONE_NEWPID = 0x20000000


def lose_an_unseen_process(rank: Rank) -> Attempt:
    make_group(rank)
    rank.comm.barrier()
    assert rank.comm._mesh.pids[0] == 0, "it is visible"
    return attempt(rank.comm.all_reduce, torch.ones(3))


def live_in_containers(rank: Rank) -> Attempt | None:
    """Rank 1 does not see the process of rank 0, as in another container."""
    if rank.rank == 1:
        denied = ctypes.CDLL(None).unshare(CLONE_NEWPID)
        rank.store.set("denied", "yes" if denied else "")
        return None if denied else in_child(lose_an_unseen_process, rank)
    if not rank.store.get("denied") and os.fork() == 0:
        make_group(rank)
        rank.comm.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return None


def test_a_dead_peer_in_another_process_namespace(fresh_pool: Callable[..., Pool]) -> None:
    [_, lost] = fresh_pool(2, Setup(init=False)).run(live_in_containers)
    if lost is None:
        pytest.skip("not run: this process may not make namespaces")
    assert lost.kind == "PeerLostError", lost
    assert lost.ranks == (0,)
    assert lost.seconds < LATE_S
    assert "its process, in another namespace, ended (with" in lost.text


def survive(rank: Rank) -> Any:
    """After the loss: destroy, and a new group of those who are left."""
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = attempt(rank.comm.all_reduce, torch.ones(2))
    fastcoll.destroy()
    store = torch.distributed.PrefixStore("again", rank.store)
    fastcoll.init(store=store, rank=rank.rank // 2, world_size=2, timeout_s=10)
    tensor = torch.ones(2)
    fastcoll.all_reduce(tensor)
    return lost.kind, tensor.tolist()


def test_the_survivors_make_a_new_group(fresh_pool: Callable[..., Pool]) -> None:
    first, second, third = fresh_pool(3).outcomes(survive)
    assert second.exit_code == -signal.SIGKILL
    assert first.value == third.value == ("PeerLostError", [2.0, 2.0])


def lose_a_child(rank: Rank, way: str) -> tuple[int, Attempt]:
    """Rank 1 is a child of rank 0, which has not asked for its status yet."""
    folder = tempfile.TemporaryDirectory()
    child = os.fork()
    store = torch.distributed.FileStore(f"{folder.name}/store", 2)
    comm = fastcoll.init(store=store, rank=int(child == 0), world_size=2, timeout_s=10)
    comm.barrier()
    if child == 0:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif way == "closed":
            comm.close()
            time.sleep(1)
        os._exit(7)
    one = attempt(comm.all_reduce, torch.ones(3))
    os.waitpid(child, 0)
    fastcoll.destroy()
    folder.cleanup()
    return child, one


@pytest.mark.parametrize(
    ("way", "fate"),
    [
        ("killed", "was killed by signal 9 (Killed)"),
        ("exited", "exited with status 7"),
        ("closed", "left the group; its process lives"),
    ],
)
def test_the_exit_status_is_told(fresh_pool: Callable[..., Pool], way: str, fate: str) -> None:
    [(child, one)] = fresh_pool(1, Setup(init=False)).run(lose_a_child, way)
    assert one.kind == "PeerLostError"
    assert f"process {child} {fate}; it had entered barrier() #1, not #2" in one.text
