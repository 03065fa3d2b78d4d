# SPDX-License-Identifier: Apache-2.0
"""send, recv and their fellows: any order, any size, any number at once."""

import gc
import random
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.harness import Pool, Pools, Rank, Setup, attempt

# float32: 216 bytes, 16 KiB, 32 KiB, 128 KiB
SIZES = (0, 1, 50, 54, 55, 1000, 4096, 4097, 8192, 8193, 33_000, 300_001)
DTYPES = ("float32", "bfloat16", "uint8", "bool", "complex128", "float8_e5m2")


def message(src: int, dst: int, tag: int, numel: int, dtype: str = "float32") -> torch.Tensor:
    """What one rank sends another: its elements tell."""
    numbers = torch.arange(numel) * 3 + src * 5 + dst * 7 + tag * 11
    return (numbers % 2 if dtype == "bool" else numbers % 16).to(getattr(torch, dtype))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def ring(rank: Rank, numel: int, dtype: str) -> bool:
    """Everybody sends to the right and receives from the left."""
    import fastcoll

    me, world = rank.rank, rank.world_size
    left, right = (me - 1) % world, (me + 1) % world
    got = torch.empty_like(message(left, me, 4, numel, dtype))
    work = fastcoll.isend(message(me, right, 4, numel, dtype), right, rank.comm, 4)
    source = fastcoll.recv(got, left, rank.comm, 4)
    work.wait()
    return source == left and same(got, message(left, me, 4, numel, dtype))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_ring_of_every_size(pools: Pools, world: int) -> None:
    for numel in SIZES:
        assert pools(world).run(ring, numel, "float32") == [True] * world


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_dtype(pools: Pools, dtype: str) -> None:
    for numel in (3, 70_001):
        assert pools(2).run(ring, numel, dtype) == [True] * 2


def ping_pong(rank: Rank, rounds: int) -> bool:
    tensor = torch.zeros(2)
    for number in range(rounds):
        if number % 2 == rank.rank:
            tensor.fill_(number)
            rank.comm.send(tensor, 1 - rank.rank)
        else:
            rank.comm.recv(tensor, 1 - rank.rank)
            if tensor[1].item() != number:
                return False
    return True


def test_blocking_calls_take_turns(pools: Pools) -> None:
    assert pools(2).run(ping_pong, 5000) == [True, True]


def in_any_order(rank: Rank, seed: int) -> list[str]:
    """All pairs, tags and sizes at once; sends and receives started in an order of each rank."""
    me, world = rank.rank, rank.world_size
    own = random.Random(seed * 64 + me)
    both = random.Random(seed)
    numels = {
        (src, dst, tag): both.choice(SIZES)
        for src in range(world)
        for dst in range(world)
        for tag in range(3)
    }
    todo = [("send", key) for key in numels if key[0] == me]
    todo += [("recv", key) for key in numels if key[1] == me]
    own.shuffle(todo)
    works, outs = [], {}
    for kind, (src, dst, tag) in todo:
        numel = numels[src, dst, tag]
        if kind == "send":
            works.append(rank.comm.isend(message(src, dst, tag, numel), dst, tag))
        else:
            outs[src, dst, tag] = torch.full((numel,), -1.0)
            works.append(rank.comm.irecv(outs[src, dst, tag], src, tag))
        if own.random() < 0.2:
            time.sleep(0.001)
    own.shuffle(works)
    for work in works:
        work.wait()
    return [str(key) for key, out in outs.items() if not same(out, message(*key, len(out)))]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_any_order(pools: Pools, world: int) -> None:
    for seed in range(6):
        assert pools(world).run(in_any_order, seed) == [[]] * world


def same_tag(rank: Rank, count: int) -> list[int]:
    """More messages of one pair and tag than its places, received in the order they were sent."""
    if rank.rank == 0:
        works = [rank.comm.isend(torch.full((80,), float(i)), 1, 9) for i in range(count)]
        for work in reversed(works):
            work.wait()
        return []
    time.sleep(0.05)
    outs = [torch.empty(80) for _ in range(count)]
    works = [rank.comm.irecv(out, 0, 9) for out in outs]
    for work in works:
        work.wait()
    return [int(out[79].item()) for out in outs]


def test_messages_of_one_tag_keep_their_order(pools: Pools) -> None:
    assert pools(2).run(same_tag, 200)[1] == list(range(200))


def later_tag_first(rank: Rank) -> list[float]:
    """Blocking receives in the opposite order of the sends."""
    if rank.rank == 0:
        works = [rank.comm.isend(torch.full((40_000,), float(tag)), 1, tag) for tag in range(5)]
        for work in works:
            work.wait()
        return []
    out, values = torch.empty(40_000), []
    for tag in reversed(range(5)):
        rank.comm.recv(out, 0, tag)
        values.append(out[39_999].item())
    return values


def test_a_later_tag_is_received_first(pools: Pools) -> None:
    assert pools(2).run(later_tag_first)[1] == [4.0, 3.0, 2.0, 1.0, 0.0]


def from_anybody(rank: Rank) -> list[int]:
    import fastcoll

    sources, out = [], torch.empty(1)
    if rank.rank:
        time.sleep(0.02 * rank.rank)
        fastcoll.send(torch.tensor([float(rank.rank)]), 0, rank.comm, 3)
        return []
    for _ in range(rank.world_size - 1):
        sources.append(fastcoll.recv(out, None, rank.comm, 3))
        assert out.item() == sources[-1]
    return sorted(sources)


def test_whoever_comes_first(pools: Pools) -> None:
    assert pools(4).run(from_anybody)[0] == [1, 2, 3]


def both_ways(rank: Rank, numel: int) -> bool:
    """The same large message both ways at once, as one batch."""
    import fastcoll

    peer = 1 - rank.rank
    out = torch.empty(numel)
    ops = [
        fastcoll.P2POp(fastcoll.isend, torch.full((numel,), float(rank.rank)), peer),
        fastcoll.P2POp("irecv", out, peer),
    ]
    for work in fastcoll.batch_isend_irecv(ops if rank.rank else ops[::-1], rank.comm):
        work.wait()
    return bool((out == peer).all())


def test_64_mebibytes_both_ways_at_once(pools: Pools) -> None:
    assert pools(2).run(both_ways, 1 << 24) == [True, True]


def beside_collectives(rank: Rank) -> list[float]:
    """A transfer gets on while its sender waits in a collective, and the other way round."""
    numel, peer = 100_000, 1 - rank.rank
    total = torch.ones(3)
    if rank.rank == 0:
        work = rank.comm.isend(torch.full((numel,), 5.0), 1)
        rank.comm.all_reduce(total)  # rank 1 comes to it after its receive
        work.wait()
        queued = rank.comm.all_reduce(total, async_op=True)
        out = torch.empty(numel)
        rank.comm.recv(out, 1)
        queued.wait()
    else:
        out = torch.empty(numel)
        rank.comm.recv(out, peer)
        rank.comm.all_reduce(total)
        rank.comm.send(torch.full((numel,), 6.0), 0)
        rank.comm.all_reduce(total)
    return [out[-1].item(), total[0].item()]


def test_beside_collectives(pools: Pools) -> None:
    assert pools(2).run(beside_collectives) == [[6.0, 4.0], [5.0, 4.0]]


def dropped(rank: Rank) -> float:
    """Neither the Work nor the tensor of a send is kept."""
    out = torch.empty(200_000)
    if rank.rank == 0:
        rank.comm.isend(torch.full((200_000,), 7.0), 1)
        gc.collect()
        junk = [torch.full((200_000,), -1.0) for _ in range(4)]
        rank.comm.barrier()
        return junk[0][0].item()
    time.sleep(0.1)
    rank.comm.recv(out, 0)
    rank.comm.barrier()
    return out.min().item()


def test_a_dropped_send_still_arrives(pools: Pools) -> None:
    assert pools(2).run(dropped)[1] == 7.0


def strided_and_numpy(rank: Rank) -> list[Any]:
    peer = 1 - rank.rank
    whole = torch.zeros(300, 4)
    work = rank.comm.irecv(whole[:, 1], peer)
    rank.comm.send(torch.arange(900.0)[::3], peer)
    work.wait()
    array = np.zeros(5)
    future = rank.comm.irecv(array, peer, 2).get_future()
    rank.comm.send(np.arange(5.0), peer, 2)
    return [whole.sum(0).tolist(), future.wait()[0].sum(), array.tolist()]


def test_strided_tensors_and_arrays(pools: Pools) -> None:
    for row in pools(2).run(strided_and_numpy):
        assert row == [[0.0, 3 * 299 * 150.0, 0.0, 0.0], 10.0, [0.0, 1, 2, 3, 4]]


def unattended(rank: Rank, rounds: int) -> list[float]:
    """Rank 0 receives what it does not wait for, in calls around the time for which its thread
    stays: every message is moved on by that thread or by its successor."""
    pauses, numel, last = random.Random(5), 40_000, []
    for number in range(rounds):
        if rank.rank == 0:
            out = torch.empty(numel)
            work = rank.comm.irecv(out, 1)
            rank.comm.barrier()  # rank 1 comes when its send is over
            work.wait()
            last.append(out[-1].item())
            time.sleep(pauses.uniform(0.018, 0.023))
        else:
            rank.comm.send(torch.full((numel,), float(number)), 0)
            rank.comm.barrier()
    return last


def test_what_nobody_waits_for_moves_on(pools: Pools) -> None:
    assert pools(2).run(unattended, 60)[0] == [float(number) for number in range(60)]


def handles(rank: Rank) -> list[str]:
    """What a Work says before, during and after its transfer."""
    wrong, out, peer = [], torch.zeros(3), 1 - rank.rank
    work = rank.comm.irecv(out, None, 6)
    if work.is_completed() or work.is_success() or work.exception() is not None:
        wrong.append("complete before there is anything")
    for limit in (0.01, timedelta(milliseconds=10)):
        late = attempt(work.wait, limit)
        if late.kind != "CollectiveTimeout" or "it goes on" not in late.text:
            wrong.append(f"wait({limit}): {late}")
    for call in (lambda: work.wait(limit=1), lambda: work.wait(1, 2)):
        if attempt(call).kind != "TypeError":
            wrong.append("wait takes anything")
    rank.comm.barrier()
    sent = rank.comm.isend(torch.full((3,), 4.0), peer, 6)
    while not work.is_completed():  # moves it on, too
        time.sleep(0.001)
    none = (None, 0, 0.0, timedelta())
    if not (all(work.wait(limit) for limit in none) and work.wait(timeout=1) and sent.wait()):
        wrong.append("wait is not true")
    if not work.is_success() or work.exception() is not None or work.source_rank() != peer:
        wrong.append("no success")
    if work.result()[0] is not out or work.get_future().wait()[0] is not out or out[2] != 4:
        wrong.append("another tensor")
    return wrong


def test_what_a_work_says(pools: Pools) -> None:
    assert pools(2).run(handles) == [[], []]


def whose_memory(rank: Rank) -> list[bool]:
    """Whether tensors live: in a transfer, its Work dropped; then after it."""
    group = rank.comm.new_group()
    out = torch.empty(50_000)
    alive = weakref.ref(out)
    group.irecv(out, 1 - rank.rank)
    del out
    gc.collect()
    seen = [alive() is not None]
    group.barrier()
    group.isend(torch.ones(50_000), 1 - rank.rank)
    while alive() is not None:  # until the thread that moved it sees that nothing more comes
        time.sleep(0.01)
    group.close()
    return [*seen, alive() is not None]


def test_memory_is_kept_as_long_as_it_is_used(pools: Pools) -> None:
    assert pools(2).run(whose_memory) == [[True, False]] * 2


# ---- through torch -------------------------------------------------------------------------------


def torch_functions(rank: Rank, backend: str) -> list[Any]:
    me, world = rank.rank, rank.world_size
    store = dist.PrefixStore(backend, rank.store)
    dist.init_process_group(backend, store=store, rank=me, world_size=world)
    left, right, results = (me - 1) % world, (me + 1) % world, []
    out = torch.empty(50_000)
    work = dist.isend(torch.full((50_000,), float(me)), right, tag=1)
    assert dist.recv(out, left, tag=1) == left
    work.wait()
    results.append(out.clone())
    if me == 0:
        sources = [dist.recv(out, tag=2) for _ in range(world - 1)]
        results.append(sorted(sources))
    else:
        dist.send(torch.ones(50_000), 0, tag=2)
    ops = [
        dist.P2POp(dist.isend, torch.full((9,), float(me)), right),
        dist.P2POp(dist.irecv, out[:9], left),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    results.append(out[:9].clone())
    pair = dist.new_group([0, world - 1])
    objects: list[Any] = [{"from": me}]
    if me == 0:
        dist.send_object_list(objects, world - 1, group=pair)
    elif me == world - 1:
        dist.recv_object_list(objects, 0, group=pair)
    results.append(objects)
    dist.barrier()
    dist.destroy_process_group()
    return results


def test_torchs_functions_as_on_gloo(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(3, Setup(init=False))
    rows = pool.run(torch_functions, "fastcoll"), pool.run(torch_functions, "gloo")
    for ours, gloos in zip(*rows, strict=True):
        assert len(ours) == len(gloos)
        for one, other in zip(ours, gloos, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
