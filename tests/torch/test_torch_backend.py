# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's own functions on both backends of fastcoll, against the same on Gloo.

The values of each verb, lists, objects and asynchronous calls stand in tests/contract. Every
program here is a function of a rank that knows nothing of its backend; it must return what it
returns on Gloo.
"""

import os
import re
import signal
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import fastcoll
from tests.support.backends import Program, in_cpp, on_backend, same
from tests.support.harness import LATE_S, Attempt, Pools, Rank, Setup, attempt
from tests.support.launched import free_port


def test_a_single_wrong_element_is_seen() -> None:
    right = [torch.arange(6.0), [torch.zeros(2, dtype=torch.int32)]]
    wrong = [torch.arange(6.0), [torch.tensor([0, 1], dtype=torch.int32)]]
    assert same(right, [torch.arange(6.0), [torch.zeros(2, dtype=torch.int32)]])
    assert not same(right, wrong)
    assert not same(right, right[:1])


# ---- the verbs -----------------------------------------------------------------------------------


def gather_single(mine: torch.Tensor, whole: torch.Tensor, root: int, async_op: bool) -> Any:
    """Torch's, which 2.14 has first; before, what it calls."""
    if hasattr(dist, "gather_single"):
        return dist.gather_single(mine, whole, root, async_op=async_op)
    group: Any = dist.group.WORLD
    options = dist.GatherOptions()
    options.rootRank = root
    options.asyncOp = async_op
    return group._get_backend(torch.device("cpu")).gather_single(whole, mine, options)


def gathered_in_one(rank: Rank) -> list[bool]:
    """So often that a plan is known; what is on other ranks than the root is left alone."""
    me, world, results = rank.rank, rank.world_size, []
    for numel in (0, 1, 700, 40_000):
        for root in range(world):
            for async_op in (False, True, False, True):
                mine = torch.arange(numel) + 1000 * me
                whole = torch.full((numel, world), -1)
                work = gather_single(mine, whole, root, async_op)
                if work is not None:
                    work.wait()
                want = torch.cat([torch.arange(numel) + 1000 * by for by in range(world)])
                results.append(torch.equal(whole.flatten(), want if me == root else want * 0 - 1))
    return results


@pytest.mark.parametrize("pools_of", ["bare_pools", "compiled_pools"])
def test_gather_into_one_tensor(request: pytest.FixtureRequest, pools_of: str) -> None:
    if pools_of == "compiled_pools" and not hasattr(dist, "gather_single"):
        pytest.skip("before torch 2.14 nobody can call it")
    for row in request.getfixturevalue(pools_of)(3).run(on_backend, "fastcoll", gathered_in_one):
        assert len(row) == 48
        assert all(row)


def groups(rank: Rank) -> list[Any]:
    """Subgroups, and a mesh of them, whose calls mix."""
    me, world, results = rank.rank, rank.world_size, []
    halves = [dist.new_group([0]), dist.new_group(list(range(1, world)))]
    mine = halves[min(me, 1)]
    tensor = torch.tensor([me + 1])
    dist.all_reduce(tensor, group=mine)
    results.append((tensor, dist.get_rank(mine), dist.get_world_size(mine)))
    last = torch.tensor([me])
    if me:
        dist.broadcast(last, world - 1, group=mine)  # by global rank
    results.append(last)
    dist.barrier()
    dist.destroy_process_group(mine)
    again = dist.new_group(list(range(world)))
    dist.all_reduce(tensor, group=again)
    results.append(tensor)
    return results


def functional(rank: Rank) -> list[Any]:
    group, mine = dist.group.WORLD, torch.arange(4) + rank.rank
    tensors = (
        funcol.all_reduce(mine, "sum", group),
        funcol.all_gather_tensor(mine, 0, group),
        funcol.reduce_scatter_tensor(mine.repeat(rank.world_size), "sum", 0, group),
        funcol.broadcast(mine, 1, group),
        funcol.all_to_all_single(mine.repeat(rank.world_size), None, None, group),
        *funcol.all_reduce_coalesced([mine, mine * 2], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([mine, mine * 2], group),
    )
    return [tensor.clone() for tensor in tensors]


def short_forms(rank: Rank) -> list[Any]:
    """The group's own methods with a tensor for a list of one, and values for torch's options."""
    me, world = rank.rank, rank.world_size
    group: Any = dist.group.WORLD
    limit, highest = timedelta(seconds=50), dist.ReduceOp.MAX
    mine, results = torch.arange(4) + 10 * me, []

    def kept(work: Any, *tensors: torch.Tensor, on: int = me) -> None:
        work.wait()
        results.extend(tensors if me == on else ())

    def room(count: int) -> list[torch.Tensor]:
        return [torch.zeros_like(mine) for _ in range(count)]

    for extra in ((), (highest,), (highest, limit)):
        for tensor in (mine.clone(), mine[:1].clone(), torch.tensor(me)):
            kept(group.allreduce(tensor, *extra), tensor)
        tensor, listed = mine.clone(), mine.clone()
        kept(group.reduce(tensor, 1, *extra), tensor, on=1)
        kept(group.allreduce([listed], *extra), listed)
        [part], given = room(1), [mine + to for to in range(world)]
        kept(group.reduce_scatter(part, given, *extra), part)
    for extra in ((), (limit,)):
        [tensor, part, *parts] = mine.clone(), *room(1 + world)
        kept(group.broadcast(tensor, 1, *extra), tensor)
        kept(group.allgather(parts, mine, *extra), *parts)
        parts = room(world)
        kept(group.gather(parts if me == 1 else [], mine, 1, *extra), *parts)
        given = [mine + to for to in range(world)] if me == 1 else []
        kept(group.scatter(part, given, 1, *extra), part)
        whole = torch.zeros(world, dtype=torch.int64)
        kept(group.alltoall_base(whole, torch.arange(world) + me, [], [], *extra), whole)
        kept(group.barrier(*extra))
    tensor, [part] = mine.clone(), room(1)
    kept(group.allreduce(tensor, op=highest, timeout=limit), tensor)
    kept(group.broadcast(tensor, root=1, timeout=limit), tensor)
    kept(group.reduce(tensor, root=0, op=highest, timeout=limit), tensor, on=0)
    kept(group.reduce_scatter(part, [mine] * world, op=highest, timeout=limit), part)
    kept(group.scatter(part, [mine] * world if me == 1 else [], root=1, timeout=limit), part)
    parts = room(world)
    kept(group.allgather(parts, mine, timeout=limit), *parts)
    kept(group.gather(parts if me == 1 else [], mine, root=1, timeout=limit), *parts)
    kept(group.barrier(timeout=limit))
    return results


def numbered_devices(rank: Rank) -> list[bool]:
    """FSDP2 and programs ask for a backend by the device of a tensor, which has a number."""
    del rank
    backend_of = dist.group.WORLD._get_backend  # type: ignore[union-attr]
    plain = type(backend_of(torch.device("cpu")))
    found = [type(backend_of(torch.device("cpu", index))) is plain for index in (0, 1)]
    return [*found, bool(attempt(backend_of, torch.device("xpu", 0)).kind)]


def questions(rank: Rank) -> list[Any]:
    """Settings and names that programs ask a group for."""
    del rank
    group: Any = dist.group.WORLD
    group._enable_collectives_timing()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    backend = group._get_backend(torch.device("cpu"))
    told = [
        getattr(backend, "supports_time_estimate", False),  # gone from torch 2.15
        type(backend.supports_tensor_alloc(torch.device("cpu"))),
    ]
    told.append(backend.eager_connect_single_device(torch.device("cpu")))
    told += [group.bound_device_id, group.group_desc]
    return [tensor, *told, dist.get_process_group_ranks(None)]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "program",
    [
        short_forms,
        groups,
        numbered_devices,
        questions,
        pytest.param(functional, marks=pytest.mark.slow),
    ],
)
def test_the_same_as_on_gloo(backend_pools: Pools, program: Program, world: int) -> None:
    ours = backend_pools(world).run(on_backend, "fastcoll", program)
    assert same(ours, backend_pools(world).run(on_backend, "gloo", program))


def coalesced_on_a_device(rank: Rank) -> list[list[float]]:
    """torch's manager with a device, which asks the backend to begin and to end."""
    me, world, cpu = rank.rank, rank.world_size, torch.device("cpu")
    pair = [torch.ones(3), torch.full((2,), float(me))]
    with dist._coalescing_manager(device=cpu, async_ops=True) as manager:
        for tensor in pair:
            dist.all_reduce(tensor)
    manager.wait()
    results = [torch.empty(world * size) for size in (2, 3)]
    with dist._coalescing_manager(device=cpu):
        for size, result in zip((2, 3), results, strict=True):
            dist.all_gather_into_tensor(result, torch.full((size,), float(me)))
    sums = [torch.empty(size) for size in (2, 3)]
    with dist._coalescing_manager(device=cpu):
        for part, result in zip(sums, results, strict=True):
            dist.reduce_scatter_tensor(part, result)
    return [(part / (me or 1)).tolist() for part in (*pair[:1], *sums)] + [pair[1].tolist()]


def test_a_list_of_calls_on_a_device(backend_pools: Pools) -> None:
    for me, row in enumerate(backend_pools(3).run(on_backend, "fastcoll", coalesced_on_a_device)):
        part = 3.0 if me else 0.0
        assert row == [[3.0 / (me or 1)] * 3, [part] * 2, [part] * 3, [3.0] * 2]


def split(rank: Rank) -> list[Any]:
    """All ranks of a group but the first, and the first alone; then a part of a part."""
    cpu, world = torch.device("cpu"), dist.group.WORLD
    ranks = [0] if rank.rank == 0 else [2, 1]
    limit = timedelta(seconds=20)
    part: Any = world.split_group(ranks, timeout=limit, group_name=f"{ranks}")  # type: ignore[union-attr]
    tensor = torch.tensor([1.0])
    part.allreduce([tensor]).wait()
    found = [tensor.item(), part.size(), part.rank(), type(part._get_backend(cpu)).__name__]
    other = part.split_group([0])
    if other is not None:
        other.allreduce([tensor]).wait()
    return [*found, other is None, tensor.item()]


def parts_of(kind: str) -> list[list[Any]]:
    """Return what `split` gives three ranks whose groups torch serves by this kind of backend."""
    first, second = [2.0, 2, 0, kind, False, 2.0], [2.0, 2, 1, kind, True, 2.0]
    # Of the ranks [2, 1] torch 2.14 has rank 2 as the first, and earlier ones have rank 1.
    later = [second, first] if torch.__version__ >= "2.14" else [first, second]
    return [[1.0, 1, 0, kind, False, 1.0], *later]


def test_a_group_is_split(backend_pools: Pools) -> None:
    kind, *_ = backend_pools(3).run(on_backend, "fastcoll", in_cpp)[0]
    assert kind in ("ProfiledProcessGroup", "FastcollBackend")
    assert backend_pools(3).run(on_backend, "fastcoll", split) == parts_of(kind)


# ---- errors --------------------------------------------------------------------------------------


def missing(rank: Rank, comes_late: bool) -> list[Attempt]:
    """Rank 1 comes when rank 0 has failed, or not at all."""
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    group = dist.new_group()
    event = f"{dist.get_backend()} failed"
    if rank.rank == 1:
        rank.wait_for(event)
        if not comes_late:
            return []
    found = attempt(dist.monitored_barrier, group, timedelta(seconds=0.5))
    rank.tell(event)
    return [found]


def test_the_monitored_barrier_of_torch(bare_pools: Any) -> None:
    """torch's own function; on Gloo it is what it was."""
    [[one], [other]] = bare_pools(2).run(on_backend, "fastcoll", missing, True)
    assert one.kind == other.kind == "CollectiveTimeout"
    assert one.ranks == (1,)
    # A rank that comes late hangs there now and then, if rank 0 has destroyed its group meanwhile.
    [[one], _] = bare_pools(2).run(on_backend, "gloo", missing, False)
    assert one.kind != "CollectiveTimeout"
    assert "monitoredBarrier" in one.text


def all_but_two(rank: Rank, wait_all: bool, limit: timedelta | None) -> list[str]:
    """Ranks 1 and 2 do not come; return what the others' errors say of it."""
    group = dist.new_group(timeout=timedelta(seconds=20))  # for Gloo's own connections, too
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    event = f"{dist.get_backend()} failed with {wait_all}, {limit}"
    if rank.rank in (1, 2):
        for other in (0, 3):
            rank.wait_for(f"{event} on {other}")
        return []
    found = attempt(dist.monitored_barrier, group, limit, wait_all)
    rank.tell(f"{event} on {rank.rank}")
    return re.findall(r"Ranks? [\d, ]+ (?:failed to pass|successfully reached) \w+", found.text) + (
        re.findall(r"in \d+ ms", found.text) if rank.rank == 0 else []
    )


@pytest.mark.parametrize("wait_all", [False, True])
def test_a_monitored_barrier_names_ranks_as_on_gloo(backend_pools: Pools, wait_all: bool) -> None:
    pool, limit = backend_pools(4), timedelta(seconds=1.5)
    first, _, _, last = pool.run(on_backend, "gloo", all_but_two, wait_all, limit)
    assert first[-1] == "in 1500 ms"
    ours = pool.run(on_backend, "fastcoll", all_but_two, wait_all, limit)
    assert ours[0] == first
    assert ours[3][:1] == last
    ours = pool.run(on_backend, "fastcoll", all_but_two, wait_all, None)
    assert ours[0] == [first[0], "in 1000 ms"]  # the group's


@pytest.mark.parametrize("backend", ["python", pytest.param("compiled", marks=pytest.mark.native)])
def test_a_monitored_barrier_over_nodes_names_the_ranks_of_all(
    fresh_pool: Any, backend: str
) -> None:
    """Each of the two nodes has a rank that does not come."""
    env = {"FASTCOLL_TORCH_BACKEND": backend}
    pool = fresh_pool(4, Setup(init=False, nodes="aabb", env=env))
    ours = pool.run(on_backend, "fastcoll", all_but_two, True, timedelta(seconds=1.5))
    said = "Ranks 1, 2 failed to pass monitoredBarrier"
    assert ours == [[said, "in 1500 ms"], [], [], [ours[3][0], said]]
    assert ours[3][0].startswith("Rank 3 successfully reached")


def late_by_its_death(rank: Rank) -> str:
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt(dist.monitored_barrier, None, timedelta(seconds=20)).text


def test_a_monitored_barrier_names_a_dead_rank_as_on_gloo(fresh_pool: Any) -> None:
    pool = fresh_pool(2, Setup(init=False))
    pool.start(on_backend, "fastcoll", late_by_its_death)
    [one] = pool.collect(ranks=[0])
    assert "Rank 1 failed to pass monitoredBarrier in 20000 ms" in one.value


def with_functions(rank: Rank) -> list[float]:
    """fastcoll's own functions on a group of this backend use its communicator."""
    group = dist.new_group([1, 0])
    tensor = torch.tensor([rank.rank + 1.0])
    fastcoll.all_reduce(tensor, group=group)
    comm = fastcoll.init(group)
    same_one = comm is group.communicator  # type: ignore[union-attr]
    fastcoll.all_reduce(tensor)
    fastcoll.destroy()
    return [tensor.item(), float(same_one)]


def test_our_functions_on_a_group_of_this_backend(bare_pools: Any) -> None:
    assert bare_pools(2).run(on_backend, "fastcoll", with_functions) == [[6.0, 1.0]] * 2


# ---- groups made anew ----------------------------------------------------------------------------


# Else a busy machine may hold up rank 0 for longer than the others wait.
@mock.patch("fastcoll.integrations.torch_base._BEHIND_FIRST_S", LATE_S)
def made_anew(rank: Rank, port: int) -> list[float]:
    """Groups at one address, one behind the other; rank 0 leaves each of them last."""
    found = []
    for _ in range(3):
        dist.init_process_group(
            "fastcoll",
            f"tcp://127.0.0.1:{port}",
            timeout=timedelta(seconds=10),
            rank=rank.rank,
            world_size=rank.world_size,
        )
        try:
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            found.append(tensor.item())
            dist.barrier()
            time.sleep(0.2 if rank.rank == 0 else 0)
        finally:
            dist.destroy_process_group()
    return found


def test_a_new_group_does_not_meet_the_old_ones_store(backend_pools: Pools) -> None:
    assert backend_pools(2).run(made_anew, free_port()) == [[2.0] * 3] * 2
