# SPDX-License-Identifier: Apache-2.0
"""Two threads of each rank use two groups, in one order here and in the other order on the peer.

Every call that makes or ends a group is collective over that group alone, so nothing of a process
may be locked meanwhile.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.api.groups import communicator_of
from tests.support.backends import COMPILE_S
from tests.support.harness import LATE_S, TIMEOUT_S, Pool, Rank, Setup

FreshPool = Callable[[int, Setup], Pool]
# How long a thread has to come to its wait for the peer before the other thread starts.
_AHEAD_S = 0.3


def sum_in(group: Any) -> float:
    tensor = torch.ones(3)
    fastcoll.all_reduce(tensor, group=group)
    return tensor[0].item()


def shrunk_size(group: Any) -> float:
    return float(fastcoll.shrink(group).world_size)


def subgroup_size(group: Any) -> float:
    return float(group.new_group().world_size)


def symmetric_size(group: Any) -> float:
    return float(group.empty(2).numel())


def native_groups(rank: Rank) -> list[Any]:
    fastcoll.init(store=rank.store, rank=rank.rank, world_size=rank.world_size, timeout_s=TIMEOUT_S)
    return [fastcoll.new_group(), fastcoll.new_group()]


def torch_groups(rank: Rank, backend: str) -> list[Any]:
    dist.init_process_group(backend, store=rank.store, rank=rank.rank, world_size=rank.world_size)
    return [dist.new_group(), dist.new_group()]


def names_on_one_store(rank: Rank) -> list[Any]:
    return [(rank, name) for name in ("a", "b")]


def size_of_named(group: tuple[Rank, str]) -> float:
    rank, name = group
    make = fastcoll.Communicator.from_store
    comm = make(rank.store, rank.rank, rank.world_size, name=name, timeout_s=TIMEOUT_S)
    assert [*comm.gather_bytes(name.encode())] == [name.encode()] * rank.world_size
    return float(comm.world_size)


def gloo_groups(rank: Rank) -> list[Any]:
    return torch_groups(rank, "gloo")


def fastcoll_groups(rank: Rank) -> list[Any]:
    return torch_groups(rank, "fastcoll")


def cross(
    rank: Rank, make: Callable[[Rank], list[Any]], use: Callable[[Any], float]
) -> list[float]:
    """Use the two groups in two threads; rank 1 starts with the second one."""
    groups = make(rank)
    found = [0.0, 0.0]

    def run(number: int) -> None:
        found[number] = use(groups[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads if rank.rank == 0 else reversed(threads):
        thread.start()
        time.sleep(_AHEAD_S)
    for thread in threads:
        thread.join()
    return found


@pytest.mark.long
@pytest.mark.parametrize("nodes", ["", "ab"])
@pytest.mark.parametrize(
    ("make", "use"),
    [
        (gloo_groups, sum_in),
        (gloo_groups, shrunk_size),
        (native_groups, shrunk_size),
        (native_groups, subgroup_size),
        (native_groups, symmetric_size),
        (fastcoll_groups, shrunk_size),
        (names_on_one_store, size_of_named),
    ],
)
def test_both_calls_succeed(
    fresh_pool: FreshPool, make: Callable[..., Any], use: Callable[..., Any], nodes: str
) -> None:
    pool = fresh_pool(2, Setup(init=False, nodes=nodes))
    assert pool.run(cross, make, use) == [[2.0, 2.0]] * 2


@pytest.mark.native
@pytest.mark.timeout(2 * COMPILE_S)
def test_both_shrinks_of_compiled_groups_succeed(fresh_pool: FreshPool) -> None:
    pool = fresh_pool(2, Setup(init=False, env={"FASTCOLL_TORCH_BACKEND": "compiled"}))
    assert pool.run(cross, fastcoll_groups, shrunk_size, deadline_s=COMPILE_S) == [[2.0, 2.0]] * 2


def use_at_once(rank: Rank) -> list[float]:
    """Eight threads make their first call on one group, on which nothing stands for it yet."""
    [group, _] = gloo_groups(rank)
    names = []
    threads = [threading.Thread(target=lambda: names.append(name_of(group))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [len(names), len(set(names)), sum_in(group)]


def name_of(group: Any) -> int:
    return id(communicator_of(group))


def test_threads_that_want_one_group_get_the_same(fresh_pool: FreshPool) -> None:
    assert fresh_pool(2, Setup(init=False)).run(use_at_once) == [[8, 1, 2.0]] * 2


def destroy_beside_a_wait(rank: Rank) -> tuple[float, float]:
    """One thread closes a group whose queued call waits for a peer; another uses a new group."""
    groups = gloo_groups(rank)
    sum_in(groups[0])
    if rank.rank == 0:
        tensor = torch.ones(3)
        fastcoll.all_reduce(tensor, group=groups[0], async_op=True)
        closing = threading.Thread(target=fastcoll.destroy)
        closing.start()
        time.sleep(_AHEAD_S)
        total = sum_in(groups[1])
        rank.tell("used")
        closing.join()
        return total, tensor[0].item()
    total = sum_in(groups[1])
    rank.wait_for("used")
    return total, sum_in(groups[0])


def test_destroy_holds_up_no_other_group(fresh_pool: FreshPool) -> None:
    assert fresh_pool(2, Setup(init=False)).run(destroy_beside_a_wait) == [(2.0, 2.0)] * 2


def fork_while_making(rank: Rank) -> tuple[float, float]:
    """A child is forked while a thread makes a group; it makes a group of its own."""
    groups = gloo_groups(rank)
    making = threading.Thread(target=sum_in, args=(groups[0],))
    own_s = 0.0
    if rank.rank == 0:
        making.start()
        time.sleep(_AHEAD_S)
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                store = dist.HashStore()
                with fastcoll.init(store=store, rank=0, world_size=1) as comm:
                    comm.all_reduce(torch.ones(3))
                    os._exit(5)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 5
        own_s = time.monotonic() - start
        rank.tell("forked")
    else:
        rank.wait_for("forked")
        making.start()
    making.join()
    return sum_in(groups[0]), own_s


def test_a_child_inherits_no_lock(fresh_pool: FreshPool) -> None:
    for total, own_s in fresh_pool(2, Setup(init=False)).run(fork_while_making):
        assert total == 2.0
        assert own_s < LATE_S
