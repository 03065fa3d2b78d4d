# SPDX-License-Identifier: Apache-2.0
"""Deaths that one node alone can have, and peers that left when their part was done.

That a killed peer is named in every call stands in test_every_fault.py, in init in test_making.py.
"""

import ctypes
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastcoll
from tests.faults.test_fork import in_child
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt, come_up


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


LAST = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(3)),
    "broadcast": lambda group: group.broadcast(torch.ones(3), 1),
    "barrier": lambda group: group.barrier(),
    "message": lambda group: (group.recv if group.rank == 0 else group.send)(
        torch.ones(3), 1 - group.rank
    ),
}


def leave_while_the_peer_looks(rank: Rank, name: str) -> Attempt:
    """Rank 1 does its part and ends during a handler of rank 0, whose wait looks for losses next.

    The wait has just seen that rank 1 has not done its part.
    """

    def handle(*_: object) -> None:
        rank.tell("rank 0 is in its handler")
        while not rank.comm.peer_is_gone(1):
            time.sleep(0.01)

    if rank.rank == 0:
        signal.signal(signal.SIGUSR2, handle)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        return attempt(LAST[name], rank.comm)
    rank.wait_for("rank 0 is in its handler")
    LAST[name](rank.comm)
    os._exit(0)


@pytest.mark.parametrize("name", LAST)
def test_a_peer_that_did_its_part_before_the_look_is_no_loss(
    fresh_pool: Callable[..., Pool], name: str
) -> None:
    first, second = fresh_pool(2).outcomes(leave_while_the_peer_looks, name)
    assert second.exit_code == 0, second.describe()
    assert first.value.kind == "", first.value


CLONE_NEWPID = 0x20000000


def lose_an_unseen_process(rank: Rank) -> Attempt:
    come_up(rank)
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
        come_up(rank)
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


def leave(rank: Rank, way: str) -> list[float]:
    """Rank 1 does its part and goes; rank 0 comes to the same call only afterwards."""
    tensor = torch.full((3,), float(rank.rank + 5))
    if rank.rank == 1:
        rank.comm.broadcast(tensor, 1)
        if way == "close":
            rank.comm.close()
            return []
        os._exit(7)
    time.sleep(0.7)
    rank.comm.broadcast(tensor, 1)
    lost = attempt(rank.comm.barrier)
    assert lost.kind == "PeerLostError", lost
    assert lost.ranks == (1,)
    return tensor.tolist()


@pytest.mark.parametrize("way", ["exit", "close"])
def test_a_peer_that_did_its_part_is_no_loss(fresh_pool: Callable[..., Pool], way: str) -> None:
    first, second = fresh_pool(2).outcomes(leave, way)
    assert first.ok, first.describe()
    assert first.value == [6.0] * 3
    assert second.exit_code == (7 if way == "exit" else None)


def part_quickly(rank: Rank, numel: int, algorithm: str, rounds: int) -> list[str]:
    """Close the group right after the call: some are still copying what others leave behind."""
    errors = []
    for _ in range(rounds):
        group = rank.comm.new_group()
        tensor = torch.full((numel,), float(rank.rank))
        one = attempt(group.all_reduce, tensor, algorithm=algorithm)
        group.close()
        right = bool((tensor == rank.world_size * (rank.world_size - 1) / 2).all())
        errors += [one.text] if one.kind else ([] if right else ["wrong sum"])
    return errors


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "chain"])
def test_leaving_right_after_a_call_is_no_loss(pools: Any, algorithm: str) -> None:
    for numel in (1, 5000, 300_000):
        assert pools(3).run(part_quickly, numel, algorithm, 12) == [[]] * 3


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
