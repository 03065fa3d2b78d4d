# SPDX-License-Identifier: Apache-2.0
"""Process groups on a program's own store, beside any world, and groups without some ranks."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.integrations.torch_backend import process_group
from tests.support.backends import on_backend
from tests.support.harness import Pool, Pools, Rank, Setup, attempt

LIMIT = timedelta(seconds=30)
FreshPool = Callable[[int, Setup], Pool]
ByStore = Callable[[dist.Store, int, int], dist.ProcessGroup]


def new_store(rank: Rank, name: str) -> dist.Store:
    """A part of the ranks' store that no earlier test has used."""
    return dist.PrefixStore(f"{name}/{rank.store.add(f'{name}/{rank.rank}', 1)}", rank.store)


def gloo_group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """A group of Gloo, as vLLM makes it for ranks that share no world."""
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(store, rank, size, LIMIT)
    group._register_backend(torch.device("cpu"), gloo, backend)
    group._set_default_backend(gloo)
    group._set_group_name("stateless")
    return group


def own_group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    return process_group(store, rank, size, LIMIT)


def use(group: dist.ProcessGroup, me: int) -> list[list[float]]:
    """Results of a group's methods, of torch's functions and of fastcoll's."""
    tensors = [torch.full((3,), float(me + 1)) for _ in range(5)]
    whole = torch.zeros(group.size())
    group.allreduce([tensors[0]]).wait()
    dist.all_reduce(tensors[1], group=group)
    dist.broadcast(tensors[2], group=group, group_src=1)
    fastcoll.all_reduce(tensors[3], group=group)
    fastcoll.broadcast(tensors[4], 1, group)
    fastcoll.all_gather_into_tensor(whole, torch.tensor([float(me)]), group)
    refused = attempt(fastcoll.broadcast, torch.ones(1), group.size(), group)
    assert (refused.kind, "global ranks" in refused.text) == ("UsageError", True)
    return [tensor.tolist() for tensor in (*tensors, whole)]


def used(world: int) -> list[list[float]]:
    total = [world * (world + 1) / 2] * 3
    return [total, total, [2.0] * 3, total, [2.0] * 3, [float(rank) for rank in range(world)]]


def without_a_world(rank: Rank) -> Any:
    store = new_store(rank, "without")
    group = own_group(store, rank.rank, rank.world_size)
    assert isinstance(group, dist.ProcessGroup)
    assert (group.rank(), group.size(), group.group_name) == (
        rank.rank,
        rank.world_size,
        "own store",
    )
    found = use(group, rank.rank)
    group.shutdown()
    return found


def larger_than_the_world(rank: Rank, make: ByStore) -> Any:
    """Each rank is a world of its own, as vLLM's data-parallel engines are."""
    store = new_store(rank, "larger")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return use(make(store, rank.rank, rank.world_size), rank.rank)
    finally:
        fastcoll.destroy()
        dist.destroy_process_group()


def test_a_group_without_a_world(backend_pools: Pools) -> None:
    assert backend_pools(3).run(without_a_world) == [used(3)] * 3


def test_a_group_without_a_world_over_nodes(fresh_pool: FreshPool) -> None:
    pool = fresh_pool(3, Setup(init=False, nodes="aab"))
    assert pool.run(without_a_world) == [used(3)] * 3


@pytest.mark.parametrize("make", [own_group, gloo_group])
def test_a_group_larger_than_the_world(backend_pools: Pools, make: ByStore) -> None:
    assert backend_pools(2).run(larger_than_the_world, make) == [used(2)] * 2


# ---- dist.shrink_group ---------------------------------------------------------------------------


def shrink(rank: Rank, excluded: int, is_killed: bool, flags: int) -> Any:
    """Go on without a rank, which does not come; use the group that is left."""
    dist.all_reduce(torch.ones(1))
    if rank.rank == excluded:
        rank.tell("left out")
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        rank.wait_for("done")  # holds the old group meanwhile
        return None
    rank.wait_for("left out")
    if is_killed:
        assert attempt(dist.all_reduce, torch.ones(1)).kind == "PeerLostError"
    group = dist.shrink_group([excluded], shrink_flags=flags)
    assert group is dist.group.WORLD and dist.get_backend() == "fastcoll"
    native = torch.full((2,), float(rank.rank))
    fastcoll.all_reduce(native)
    summed = torch.full((2,), float(rank.rank))
    dist.all_reduce(summed)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rank.rank)
    rank.tell("done")
    return dist.get_rank(), parts, summed.tolist(), native.tolist()


@pytest.mark.long
@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="torch before 2.10 can't shrink")
@pytest.mark.parametrize("nodes", ["", "aab"])
@pytest.mark.parametrize("backend", ["python", "compiled"])
@pytest.mark.parametrize(("is_killed", "flags"), [(False, 0), (False, 1), (True, 0)])
def test_a_group_goes_on_without_a_rank(
    fresh_pool: FreshPool, backend: str, nodes: str, is_killed: bool, flags: int
) -> None:
    env = {"FASTCOLL_TORCH_BACKEND": backend}
    pool = fresh_pool(3, Setup(init=False, nodes=nodes, env=env))
    pool.start(on_backend, "fastcoll", shrink, 1, is_killed, flags)
    first, last = (one.value for one in pool.collect(ranks=[0, 2]))
    assert first == (0, [0, 2], [2.0, 2.0], [2.0, 2.0])
    assert last == (1, [0, 2], [2.0, 2.0], [2.0, 2.0])
