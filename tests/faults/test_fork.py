# SPDX-License-Identifier: Apache-2.0
"""A forked child of a rank: it can't use the group, does it no harm, and may make its own."""

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.calls.arrays import copy_back
from fastcoll.calls.work import CallWork
from tests.support.harness import LATE_S, TIMEOUT_S, Attempt, Pool, Pools, Rank, Setup, attempt


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a forked child and return what it returned."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, pickle.dumps(function(*args)))
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert data, "the child had nothing to say"
    return pickle.loads(data)


def sum_of(comm: Any, value: float) -> float:
    tensor = torch.tensor([value])
    comm.all_reduce(tensor)
    return tensor.item()


def try_everything(comm: Any) -> list[Attempt]:
    tensor = torch.ones(3)
    return [
        attempt(fastcoll.all_reduce, tensor),
        attempt(comm.all_reduce, torch.ones(50_000)),
        attempt(comm.broadcast, tensor, 0),
        attempt(comm.barrier),
        attempt(comm.reduce_scatter_tensor, tensor[:1], torch.ones(comm.world_size)),
        attempt(lambda: comm.all_reduce(tensor, async_op=True).wait(5)),
        attempt(comm.empty, (3,)),
        attempt(comm.new_group),
    ]


def fork_with_pending_calls(rank: Rank) -> tuple[list[str], list[float]]:
    """Asynchronous calls are under way while a child comes and goes."""
    tensors = [torch.full((30_000,), float(number)) for number in range(10)]
    works = [rank.comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    kinds = [one.kind for one in in_child(try_everything, rank.comm)]
    for work in works:
        work.wait()
    return kinds, [tensor[3].item() for tensor in tensors]


def test_pending_calls_survive_a_fork(pools: Pools) -> None:
    for kinds, values in pools(2).run(fork_with_pending_calls):
        assert kinds == ["UsageError"] * 8
        assert values == [2.0 * number for number in range(10)]


def fork_and_wait(rank: Rank, numel: int) -> tuple[list[Attempt], float]:
    """A child waits for a call of its parent's, which it has not the thread for."""
    tensor = torch.full((numel,), 1.0)
    rank.comm.all_reduce(tensor)
    if rank.rank == 1:
        rank.wait_for(f"waited for {numel}")
    work = rank.comm.all_reduce(tensor, async_op=True)
    attempts = []
    if rank.rank == 0:
        attempts = in_child(lambda: [attempt(work.wait), attempt(work.wait, 5)])
        rank.tell(f"waited for {numel}")
    work.wait()
    return attempts, tensor[0].item()


@pytest.mark.parametrize("numel", [3, 30_000])
def test_a_child_cannot_wait_for_its_parents_calls(pools: Pools, numel: int) -> None:
    (attempts, first), (_, second) = pools(2).run(fork_and_wait, numel)
    assert [one.kind for one in attempts] == ["UsageError"] * 2
    assert all("fork" in one.text and one.seconds < LATE_S for one in attempts)
    assert first == second == 4.0


def fork_with_open_transfers(rank: Rank) -> tuple[list[Attempt], list[Any]]:
    """A child asks the handle of its parent's receive, before the message and behind it."""
    peer, got = 1 - rank.rank, torch.zeros(50_000)
    receive = rank.comm.irecv(got, peer)

    def ask() -> list[Attempt]:
        # By the connection of its parent, both would be given answers to the other's questions.
        with mock.patch.object(dist.Store, "set", side_effect=AssertionError("used the store")):
            waits = [attempt(receive.wait), attempt(receive.wait, 5)]
            return [*waits, attempt(lambda: receive.get_future().wait())]

    attempts = in_child(ask)
    found = [in_child(receive.is_completed)]
    rank.tell(f"asked {rank.rank}")
    rank.wait_for(f"asked {peer}")
    send = rank.comm.isend(torch.ones(50_000), peer)
    receive.wait()
    send.wait()
    return attempts, [*found, in_child(receive.wait), got.sum().item()]


@pytest.mark.parametrize("nodes", ["", "ab"], ids=["one node", "two nodes"])
def test_a_child_cannot_wait_for_its_parents_transfers(
    fresh_pool: Callable[..., Pool], nodes: str
) -> None:
    pool = fresh_pool(2, Setup(nodes=nodes))
    for attempts, found in pool.run(fork_with_open_transfers):
        assert [one.kind for one in attempts] == ["FastcollError" if nodes else "UsageError"] * 3
        assert all("fork" in one.text and one.seconds < LATE_S for one in attempts), attempts
        assert found == [False, True, 50_000.0]


def fork_while_a_message_is_copied(rank: Rank) -> list[Any] | None:
    """Another thread brings a message's elements to their places."""
    if rank.rank:
        rank.comm.send(torch.ones(100), 0)
        return None
    got, is_copying, gate = torch.zeros(200)[::2], threading.Event(), threading.Event()
    receive = rank.comm.irecv(got, 1)

    def copy_late(*args: Any) -> None:
        if threading.current_thread() is thread and os.getpid() == parent:
            is_copying.set()
            gate.wait()
        copy_back(*args)

    parent, thread = os.getpid(), threading.Thread(target=receive.wait)
    with mock.patch("fastcoll.calls.transfer_work.copy_back", copy_late):
        thread.start()
        is_copying.wait()
        found = in_child(lambda: [receive.is_completed(), receive.wait(), got.sum().item()])
        gate.set()
        thread.join()
    return [*found, got.sum().item()]


def test_a_child_gets_a_message_that_its_parent_copies(fresh_pool: Callable[..., Pool]) -> None:
    assert fresh_pool(2).run(fork_while_a_message_is_copied)[0] == [True, True, 100.0, 100.0]


def fork_while_a_future_is_made(rank: Rank) -> float:
    """Another thread is making the future of another call."""
    tensor, is_made, gate = torch.ones(3), threading.Event(), threading.Event()
    rank.comm.all_reduce(tensor)  # later calls of its kind are queued in C++
    first, second = (rank.comm.all_reduce(tensor, async_op=True) for _ in range(2))
    assert isinstance(first, CallWork)
    second.wait()

    def complete_late(*args: Any) -> None:
        is_made.set()
        gate.wait()

    with mock.patch("fastcoll.calls.work.complete", complete_late):
        thread = threading.Thread(target=first.get_future)
        thread.start()
        is_made.wait()
    found = in_child(lambda: second.get_future().wait()[0].sum().item())
    gate.set()
    thread.join()
    return found


def test_a_child_may_ask_for_a_future(fresh_pool: Callable[..., Pool]) -> None:
    assert fresh_pool(2).run(fork_while_a_future_is_made) == [24.0] * 2


def close_all() -> str:
    """Do as a child that ends like a program: destroy what it thinks is its own."""
    fastcoll.destroy()
    return "closed"


def own_group() -> float:
    """A group of the child's own, after letting go of its parent's."""
    fastcoll.destroy()
    store = dist.HashStore()
    with fastcoll.init(store=store, rank=0, world_size=1) as comm:
        return sum_of(comm, 3.0)


def told_apart(one: Attempt) -> bool:
    """Whether an error says that the process was forked, and what to do."""
    words = ("forked", "in the parent", "fastcoll.destroy()", "fastcoll.init(store=")
    return one.kind == "UsageError" and all(word in one.text for word in words)


def long_sum(comm: Any) -> float:
    """A sum that waits for the other node long enough to look for a verdict."""
    if comm.rank == 0:
        time.sleep(0.5)
    return sum_of(comm, 1.0)


def fork_and_try(rank: Rank) -> tuple[list[Attempt], list[Any]]:
    attempts = in_child(try_everything, rank.comm)
    attempts += in_child(lambda comm: [attempt(comm.shrink), attempt(comm.abort)], rank.comm)
    attempts += in_child(lambda comm: [attempt(comm.send, torch.ones(3), 1 - rank.rank)], rank.comm)
    found = [long_sum(rank.comm), in_child(close_all), sum_of(rank.comm, 2.0)]
    return attempts, [*found, in_child(own_group), sum_of(rank.comm, 3.0)]


@pytest.mark.parametrize("nodes", ["", "ab"], ids=["one node", "two nodes"])
def test_a_child_cannot_use_the_group(fresh_pool: Callable[..., Pool], nodes: str) -> None:
    """It says nothing to the peers: what it tries breaks nothing, nor does its destroy."""
    for attempts, found in fresh_pool(2, Setup(nodes=nodes)).run(fork_and_try):
        assert found == [2.0, "closed", 4.0, 3.0, 6.0]
        assert [one for one in attempts if not told_apart(one)] == []
        assert all(one.seconds < LATE_S for one in attempts)


def fork_before_the_first_call(rank: Rank, is_used: bool) -> tuple[list[Attempt], float]:
    """A child of a rank of Gloo's uses a process group for which nothing may stand yet."""
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=2)
    group = dist.group.WORLD
    if is_used:
        fastcoll.all_reduce(torch.ones(3), group=group)
    calls = [lambda: fastcoll.all_reduce(torch.ones(3), group=group)]
    calls += [] if is_used else [lambda: fastcoll.all_reduce(torch.ones(3)), fastcoll.init]
    attempts = in_child(lambda: [attempt(call) for call in calls])
    tensor = torch.ones(3)
    fastcoll.all_reduce(tensor, group=group, timeout_s=TIMEOUT_S)
    return attempts, tensor[0].item()


@pytest.mark.parametrize("is_used", [False, True])
def test_a_child_cannot_use_its_parents_process_group(
    fresh_pool: Callable[..., Pool], is_used: bool
) -> None:
    pool = fresh_pool(2, Setup(init=False))
    for attempts, total in pool.run(fork_before_the_first_call, is_used):
        assert total == 2.0
        assert [one for one in attempts if not told_apart(one)] == []
        assert all(one.seconds < LATE_S for one in attempts)


LIST = """
import os
for name in os.listdir("/proc/self/fd"):
    if os.path.exists(f"/proc/self/fd/{name}"):
        print(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
"""


def inherited() -> list[str]:
    """List, by kind, what a program finds open if it gets every inheritable descriptor."""
    command = [sys.executable, "-c", LIST]
    done = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True)
    return sorted(done.stdout.split())


def execute(rank: Rank) -> tuple[list[str], list[str]]:
    before = inherited()
    comm = fastcoll.init(store=rank.store, rank=rank.rank, world_size=rank.world_size)
    comm.all_reduce(comm.empty(5).fill_(1))
    return before, inherited()


def test_an_executed_program_inherits_nothing(fresh_pool: Callable[..., Pool]) -> None:
    for before, after in fresh_pool(2, Setup(init=False)).run(execute):
        assert after == before


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def load(rank: Rank) -> list[float]:
    """Worker processes of a DataLoader live and die while calls go on."""
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    totals = []
    for batch in loader:
        mean = batch.mean()
        rank.comm.all_reduce(mean)
        totals.append(mean.item())
    return [*totals, sum_of(rank.comm, 1.0)]


def test_workers_of_a_data_loader(pools: Pools) -> None:
    wanted = [2 * (4.0 * number + 1.5) for number in range(6)] + [2.0]
    pool = pools(2)
    assert pool.run(load) == [wanted] * 2
