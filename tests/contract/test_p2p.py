# SPDX-License-Identifier: Apache-2.0
"""send, recv and their fellows, at every site: any order, any size, any number at once.

The handles stand in test_p2p_works.py; transfers that fail in faults/test_p2p_failures.py and
torch/test_torch_transfers.py.
"""

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from fastcoll.calls.batches import P2POp
from tests.support.harness import Pools, Rank
from tests.support.sites import Site, each_kind, without_gpu

# float32: 224 bytes, 16 KiB, 64 KiB, 128 KiB
SIZES = (0, 1, 50, 56, 57, 1000, 4096, 4097, 16_384, 16_385, 33_000, 300_001)
DTYPES = ("float32", "bfloat16", "uint8", "bool", "complex64", "complex128", "float8_e5m2")
LARGE = 1 << 20  # more than a sender can put down without its receiver


def message(src: int, dst: int, tag: int, numel: int, dtype: str = "float32") -> torch.Tensor:
    """A message from one rank to another: its elements tell which one it is."""
    numbers = torch.arange(numel) * 3 + src * 5 + dst * 7 + tag * 11
    return (numbers % 2 if dtype == "bool" else numbers % 16).to(getattr(torch, dtype))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    packed = (x.clone(memory_format=torch.contiguous_format).reshape(-1) for x in (one, other))
    return torch.equal(*(x.view(torch.uint8) for x in packed))


def kinds(src: int, dst: int) -> list[torch.Tensor]:
    """Messages of every size, dtype and layout."""
    sizes = [message(src, dst, tag, numel) for tag, numel in enumerate(SIZES)]
    dtypes = [
        message(src, dst, tag, numel, dtype)
        for tag, dtype in enumerate(DTYPES)
        for numel in (3, 70_001)
    ]
    rows = message(src, dst, 1, 1200).view(300, 4)
    return [*sizes, *dtypes, rows[:, 1], rows.t(), rows[0, 0], torch.zeros(0, 3)]


def around(rank: Rank, way: str) -> list[int]:
    """Everybody sends to the next rank, one by one, all at once or in a batch; what came wrong."""
    me, world, comm = rank.rank, rank.world_size, rank.comm
    after, before = (me + 1) % world, (me - 1) % world
    given, wants = kinds(me, after), kinds(before, me)
    # Of another layout than what is sent, and with gaps that must stay.
    room = [torch.full((*want.shape, 2), 1).to(want.dtype) for want in wants]
    got = [
        torch.empty_like(one[..., 0]) if number % 3 else one[..., 0]
        for number, one in enumerate(room)
    ]
    if way == "in a batch":
        ops = [P2POp("irecv", tensor, before, tag=5) for tensor in got]
        ops += [P2POp("isend", tensor, after, tag=5) for tensor in given]
        works = comm.batch_isend_irecv(ops)
    else:
        works = []
        for tensor, target in zip(given, got, strict=True):
            works.append(comm.isend(tensor, after, tag=4))
            if way == "one by one":
                assert comm.recv(target, before, tag=4) == before
        if way == "all at once":
            works += [comm.irecv(target, before, tag=4) for target in got]
    for work in works:
        work.wait()
    gaps = [bool((one[..., 1] == torch.ones(()).to(one.dtype)).all()) for one in room]
    right = [same(target, want) for target, want in zip(got, wants, strict=True)]
    return [number for number in range(len(got)) if not (right[number] and gaps[number])]


@without_gpu
@pytest.mark.parametrize("way", ["one by one", "all at once", "in a batch"])
def test_every_kind_of_tensor(site: Site, way: str) -> None:
    assert site.run(around, way) == [[]] * site.world


def in_any_order(rank: Rank, seed: int) -> list[str]:
    """All pairs, tags and sizes at once; sends and receives started in an order of each rank."""
    me, world, comm = rank.rank, rank.world_size, rank.comm
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
    works, outs, wrong = [], {}, []
    for kind, (src, dst, tag) in todo:
        numel = numels[src, dst, tag]
        if kind == "send":
            works.append(comm.isend(message(src, dst, tag, numel), dst, tag=tag))
        else:
            outs[src, dst, tag] = torch.full((numel,), -1.0)
            works.append(comm.irecv(outs[src, dst, tag], src, tag=tag))
        if own.random() < 0.2:
            time.sleep(0.001)
    own.shuffle(works)
    for work in works:
        work.wait()
        if not work.is_success():
            wrong.append("no success")
    return wrong + [str(key) for key, out in outs.items() if not same(out, message(*key, len(out)))]


@without_gpu
def test_any_order(site: Site) -> None:
    for seed in range(6 if not site.nodes else 2):
        assert site.run(in_any_order, seed) == [[]] * site.world


@pytest.mark.parametrize("world", [1, 5])
def test_any_order_in_other_worlds(pools: Pools, world: int) -> None:
    assert pools(world).run(in_any_order, 3) == [[]] * world


def ping_pong(rank: Rank, rounds: int) -> bool:
    """Blocking calls of the first and the last rank in turns."""
    tensor, last = torch.zeros(2), rank.world_size - 1
    for number in range(rounds):
        if rank.rank not in (0, last):
            break
        if (number % 2 == 0) == (rank.rank == 0):
            tensor.fill_(number)
            rank.comm.send(tensor, last - rank.rank)
        else:
            rank.comm.recv(tensor, last - rank.rank)
            if tensor[1].item() != number:
                return False
    return True


@each_kind
def test_blocking_calls_take_turns(site: Site) -> None:
    assert all(site.run(ping_pong, 100 if site.nodes else 3000))


def same_tag(rank: Rank, count: int) -> list[int]:
    """More messages of one pair and tag than its places, received in the order they were sent."""
    last = rank.world_size - 1
    if rank.rank == 0:
        works = [rank.comm.isend(torch.full((80,), float(i)), last, tag=9) for i in range(count)]
        for work in reversed(works):
            work.wait()
    if rank.rank < last:
        return []
    time.sleep(0.05)
    outs = [torch.empty(80) for _ in range(count)]
    works = [rank.comm.irecv(out, 0, tag=9) for out in outs]
    for work in works:
        work.wait()
    return [int(out[79].item()) for out in outs]


@each_kind
def test_messages_of_one_tag_keep_their_order(site: Site) -> None:
    assert site.run(same_tag, 200)[-1] == list(range(200))


def later_tag_first(rank: Rank) -> list[float]:
    """Blocking receives in the opposite order of the sends."""
    last = rank.world_size - 1
    if rank.rank == 0:
        works = [
            rank.comm.isend(torch.full((40_000,), float(tag)), last, tag=tag) for tag in range(5)
        ]
        for work in works:
            work.wait()
    if rank.rank < last:
        return []
    out, values = torch.empty(40_000), []
    for tag in reversed(range(5)):
        assert rank.comm.recv(out, 0, tag=tag) == 0
        values.append(out[39_999].item())
    return values


@each_kind
def test_a_later_tag_is_received_first(site: Site) -> None:
    assert site.run(later_tag_first)[-1] == [4.0, 3.0, 2.0, 1.0, 0.0]


EACH = 8


def letter(source: int, number: int) -> torch.Tensor:
    """A message that tells who sent it and when; some travel in pieces."""
    numel = 1 if number % 2 else 70_001
    return torch.full((numel,), float(100 * source + number))


def from_anybody(rank: Rank) -> list[list[float]]:
    """Everybody sends to rank 0, itself too; each rank's messages as they came."""
    me, world, comm = rank.rank, rank.world_size, rank.comm
    sends = [comm.isend(letter(me, number), 0, tag=10 + number % 2) for number in range(EACH)]
    found: list[list[float]] = [[] for _ in range(world)]
    for parity in (0, 1) if me == 0 else ():
        tensor = torch.zeros(len(letter(0, parity)))
        for _ in range(world * EACH // 2):
            work = comm.irecv(tensor, None, tag=10 + parity)  # torch's recv takes nothing of itself
            work.wait()
            assert (tensor == tensor[0]).all()
            found[work.source_rank()].append(float(tensor[0]))
    for work in sends:
        work.wait()
    return found


def check_from_anybody(found: list[list[float]]) -> None:
    """Each rank's messages come in their order, whoever comes first."""
    order = [*range(0, EACH, 2), *range(1, EACH, 2)]
    for source, numbers in enumerate(found):
        assert numbers == [float(letter(source, number)[0]) for number in order]


@without_gpu
def test_whoever_comes_first(site: Site) -> None:
    for _ in range(2):
        check_from_anybody(site.run(from_anybody)[0])


def both_ways(rank: Rank, numel: int) -> bool:
    """The same large message both ways at once, as one batch."""
    peer, out = 1 - rank.rank, torch.empty(numel)
    ops = [P2POp("isend", torch.full((numel,), float(rank.rank)), peer), P2POp("irecv", out, peer)]
    for work in rank.comm.batch_isend_irecv(ops if rank.rank else ops[::-1]):
        work.wait()
    return bool((out == peer).all())


def test_64_mebibytes_both_ways_at_once(pools: Pools) -> None:
    assert pools(2).run(both_ways, 1 << 24) == [True, True]


def beside_collectives(rank: Rank) -> list[float]:
    """Transfers that are open while collectives run and wait, in both directions."""
    me, world, comm = rank.rank, rank.world_size, rank.comm
    after, before, found = (me + 1) % world, (me - 1) % world, []
    for turn in range(5):
        taken, total, mine = torch.zeros(LARGE), torch.full((100,), float(turn)), torch.ones(1)
        receive = comm.irecv(taken, before, tag=turn)
        reduce = comm.all_reduce(total, async_op=True)
        send = comm.isend(torch.full((LARGE,), float(me)), after, tag=turn)
        comm.barrier()
        comm.all_reduce(mine)
        for work in (reduce, send, receive):
            work.wait()
        found += [taken.sum().item() / LARGE - before, total[99].item() - turn * world]
        found.append(mine.item() - world)
    return found


@each_kind
def test_beside_collectives(site: Site) -> None:
    assert site.run(beside_collectives) == [[0.0] * 15] * site.world


def blocked_in_a_collective(rank: Rank) -> list[float]:
    """A transfer gets on while its sender waits in a collective, and the other way round."""
    numel, peer = 100_000, rank.rank ^ 1
    total, out = torch.ones(3), torch.empty(numel)
    if rank.rank % 2 == 0:
        work = rank.comm.isend(torch.full((numel,), 5.0), peer)
        rank.comm.all_reduce(total)  # the peer comes to it after its receive
        work.wait()
        queued = rank.comm.all_reduce(total, async_op=True)
        rank.comm.recv(out, peer)
        queued.wait()
    else:
        rank.comm.recv(out, peer)
        rank.comm.all_reduce(total)
        rank.comm.send(torch.full((numel,), 6.0), peer)
        rank.comm.all_reduce(total)
    return [out[-1].item(), total[0].item()]


@each_kind
def test_a_sender_may_wait_in_a_collective(site: Site) -> None:
    if site.world % 2:
        pytest.skip("ranks in pairs")
    rows = [[6.0, site.world**2.0], [5.0, site.world**2.0]]
    assert site.run(blocked_in_a_collective) == rows * (site.world // 2)


def arrays(rank: Rank) -> list[Any]:
    peer, array = 1 - rank.rank, np.zeros(5)
    future = rank.comm.irecv(array, peer, 2).get_future()
    rank.comm.send(np.arange(5.0), peer, 2)
    return [future.wait()[0].sum(), array.tolist()]


def test_arrays(pools: Pools) -> None:
    assert pools(2).run(arrays) == [[10.0, [0.0, 1, 2, 3, 4]]] * 2
