# SPDX-License-Identifier: Apache-2.0
"""fastcoll's own functions with a torch process group as `group=`: whose ranks, and how quick."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.api import groups
from tests.support.backends import on_backend, same
from tests.support.fallbacks import refusing
from tests.support.harness import Attempt, Pool, Rank, Setup, attempt


def make_calls(group: dist.ProcessGroup, me: int) -> dict[str, list[float]]:
    """Return what each verb gives on ranks 0 and 2; roots are global ranks."""
    mine, whole = torch.full((5,), float(me)), torch.zeros(10)
    from_root, to_root, summed = torch.full((5,), float(me)), mine.clone(), mine.clone()
    given = list(torch.arange(10.0).chunk(2)) if me == 2 else None
    scattered = torch.zeros(5)
    gathered = list(torch.zeros(10).chunk(2)) if me == 2 else None
    fastcoll.all_reduce(summed, group=group)
    fastcoll.broadcast(from_root, 2, group)
    fastcoll.reduce(to_root, 2, group=group)
    fastcoll.all_gather_into_tensor(whole, mine, group)
    fastcoll.gather(mine, gathered, 2, group)
    fastcoll.scatter(scattered, given, 2, group)
    found = {
        "all_reduce": summed,
        "broadcast": from_root,
        "reduce": to_root if me == 2 else summed,
        "all_gather": whole,
        "gather": torch.cat(gathered) if gathered is not None else whole,
        "scatter": scattered,
    }
    return {name: tensor.tolist() for name, tensor in found.items()}


def with_roots(rank: Rank) -> list[Any]:
    """A subgroup of global ranks 0 and 2: by Python, by C++, and after its communicator is gone."""
    group = dist.new_group([0, 2])
    me = dist.get_rank()
    if me == 1:
        return []

    found: list[Any] = [make_calls(group, me)]
    with refusing():
        found.append(make_calls(group, me))
    found.append(attempt(fastcoll.broadcast, torch.ones(5), 1, group).kind)
    first = groups.communicator_of(group)
    assert first is not None
    first.barrier()
    first.close()
    found += [make_calls(group, me), groups.communicator_of(group) is not first]
    return found


def test_roots_are_global_ranks(bare_pools: Callable[[int], Pool]) -> None:
    zeros, _, twos = bare_pools(3).run(on_backend, "gloo", with_roots)
    for me, found in ((0, zeros), (2, twos)):
        want = {
            "all_reduce": [2.0] * 5,
            "broadcast": [2.0] * 5,
            "reduce": [2.0] * 5,
            "all_gather": [0.0] * 5 + [2.0] * 5,
            "gather": [0.0] * 5 + [2.0] * 5,
            "scatter": [float(i) for i in range(5)]
            if me == 0
            else [float(i) for i in range(5, 10)],
        }
        assert found == [want, want, "UsageError", want, True]


def by_group_ranks(rank: Rank, module_name: str) -> list[Any]:
    """A subgroup of global ranks 0 and 2: ranks as torch's newer arguments name them."""
    module: Any = fastcoll if module_name == "fastcoll" else dist
    group, me = dist.new_group([0, 2]), dist.get_rank()
    if me == 1:
        return []
    own = dist.get_group_rank(group, me)
    mine, got = torch.full((5,), float(me)), torch.zeros(5)
    from_root, to_root, scattered = mine.clone(), mine.clone(), torch.zeros(5)
    gathered = list(torch.zeros(10).chunk(2)) if own == 1 else None
    module.broadcast(from_root, group=group, group_src=1)
    module.reduce(to_root, group=group, group_dst=1)
    module.gather(mine, gathered, group=group, group_dst=1)
    given = list(torch.arange(10.0).chunk(2)) if own == 1 else None
    module.scatter(scattered, given, group=group, group_src=1)
    results: list[Any] = [from_root, to_root if own else None, gathered, scattered]
    if own == 0:
        module.send(mine, group=group, group_dst=1)
        module.isend(mine + 1, group=group, group_dst=1).wait()
    else:
        results.append(module.recv(got, group=group, group_src=0))
        results.append(got.clone())
        module.irecv(got, group=group, group_src=0).wait()
        results.append(got)
    for peer in ({"peer": 2 - me}, {"group_peer": 1 - own}):
        out = torch.zeros(5)
        ops = [
            module.P2POp(module.isend, mine + 7, group=group, **peer),
            module.P2POp(module.irecv, out, group=group, **peer),
        ]
        for work in module.batch_isend_irecv(ops):
            work.wait()
        results.append(out)
    known = [f"from {me}"]
    module.broadcast_object_list(known, group=group, group_src=1)
    everybodys = [None, None] if own else None
    module.gather_object(me, everybodys, group=group, group_dst=1)
    one: list[Any] = [None]
    module.scatter_object_list(one, ["a", "b"] if own else None, group=group, group_src=1)
    sent = ["sent"] if own else ["?"]
    if own:
        module.send_object_list(sent, group=group, group_dst=0)
    else:
        module.recv_object_list(sent, group=group, group_src=1)
    module.barrier(group, device_ids=None)
    return [*results, known, everybodys, one, sent]


def test_ranks_of_the_group_by_name(bare_pools: Callable[[int], Pool]) -> None:
    ours = bare_pools(3).run(on_backend, "gloo", by_group_ranks, "fastcoll")
    torchs = bare_pools(3).run(on_backend, "gloo", by_group_ranks, "torch")
    assert [len(row) for row in ours] == [10, 0, 13]
    assert same(ours, torchs)


def batches_of_torch(rank: Rank) -> list[Any]:
    """torch's own P2POps; batches not of one group, and ranks named twice or not at all."""
    group, me = dist.group.WORLD, dist.get_rank()
    other, peer, out = dist.new_group([0, 1]), me ^ 1, torch.zeros(3)
    mine = torch.full((3,), float(me))
    ops = [dist.P2POp(dist.isend, mine, peer, tag=3), dist.P2POp(dist.irecv, out, peer, tag=3)]
    works = fastcoll.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    mistakes: list[Callable[[], object]] = [
        lambda: fastcoll.batch_isend_irecv([*ops, fastcoll.P2POp("isend", mine, peer, other)]),
        lambda: fastcoll.batch_isend_irecv(ops, other),
        lambda: fastcoll.broadcast(mine, 0, group, group_src=0),
        lambda: fastcoll.broadcast(mine, group=group),
        lambda: fastcoll.broadcast(mine, group=group, group_src=2),
        lambda: fastcoll.send(mine),
        lambda: fastcoll.irecv(mine, 0, group, group_src=0),
    ]
    fastcoll.barrier(group)
    return [out.tolist(), [attempt(mistake).kind for mistake in mistakes]]


def test_batches_of_torch(bare_pools: Callable[[int], Pool]) -> None:
    rows = bare_pools(2).run(on_backend, "gloo", batches_of_torch)
    assert rows == [[[1.0 - rank] * 3, ["UsageError"] * 7] for rank in range(2)]


def waits_for_a_group(rank: Rank) -> tuple[Attempt, float] | None:
    if rank.rank == 1:
        rank.wait_for("rank 0 gave up")
        return None
    start = time.monotonic()
    found = attempt(dist.new_group, [0, 1], timedelta(seconds=1))
    took_s = time.monotonic() - start
    rank.tell("rank 0 gave up")
    return found, took_s


@pytest.mark.parametrize("variant", ["auto", "python"])
def test_making_a_group_takes_its_limit_and_no_longer(
    fresh_pool: Callable[..., Pool], variant: str
) -> None:
    """Where nobody compiles, there is nothing to wait longer for."""
    pool = fresh_pool(2, Setup(init=False, env={"FASTCOLL_TORCH_BACKEND": variant}))
    first, _ = pool.run(on_backend, "fastcoll", waits_for_a_group)
    found, took_s = first
    assert found.kind == "CollectiveTimeout"
    assert "ranks [1]" in found.text
    assert took_s < 20
