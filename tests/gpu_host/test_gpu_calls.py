# SPDX-License-Identifier: Apache-2.0
"""Sends, mistakes and losses on a GPU whose kernels are the CPU's (support/fake_gpu.py)."""

import dataclasses
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.errors import UnsupportedError
from fastcoll.gpu.batches import pair_channels
from fastcoll.native import _C
from tests.contract.test_gpu_parts import go_through, messages
from tests.support.gpu import needs_gpu_part
from tests.support.harness import LATE_S, Attempt, Pools, Rank, attempt
from tests.support.sites import group_on_fake_gpu

pytestmark = needs_gpu_part

WORLD = 3


# ---- sends and receives --------------------------------------------------------------------------


def batch_only(rank: Rank, num_channels: int) -> tuple[list[str], list[int]]:
    """Everybody sends two messages to everybody; how many transfers each kernel was given."""
    with group_on_fake_gpu(rank, num_channels=num_channels) as (group, core):
        me = dataclasses.replace(rank, comm=group)
        return go_through(me, messages, [(40, "float32")]), core.log


def one_way(rank: Rank, num_channels: int) -> list[bool]:
    tensor = torch.full((5,), float(rank.rank))
    with group_on_fake_gpu(rank, num_channels=num_channels) as (group, _):
        if rank.rank == 0:
            group.send(tensor, 1, tag=3)
        else:
            assert group.recv(tensor, 0, tag=3) == 0
    return [bool((tensor == 0).all())]


@pytest.mark.parametrize("num_channels", [2, 16])
def test_batches_of_sends_and_receives(own_pools: Pools, num_channels: int) -> None:
    rows = own_pools(2).run(one_way, num_channels)
    assert rows == [[True], [True]]
    for wrong, log in own_pools(WORLD).run(batch_only, num_channels):
        assert wrong == []
        # Two messages for each pair and direction; with few channels a distance at a time.
        distances = WORLD - 1 if num_channels == 2 else 2
        assert len(log) == 2 * distances
        assert sum(log) == 4 * (WORLD - 1)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, list[list[tuple[int, int]]]]:
    """A world, its channels, and the messages of each pair: (sender, receiver), repeated."""
    world = draw(st.integers(1, 16))
    ranks = st.integers(0, world - 1)
    pairs = draw(st.lists(st.tuples(ranks, ranks), max_size=40))
    orders = [draw(st.permutations(pairs)) for _ in range(world)]
    return world, draw(st.integers(2, 64)), orders


@settings(max_examples=50, deadline=None)
@given(worlds())
def test_all_ranks_come_to_a_kernel_of_a_transfer_together(case: Any) -> None:
    world, channels, orders = case
    plans = []
    for rank, order in enumerate(orders):
        mine = [(True, to) for by, to in order if by == rank]
        mine += [(False, by) for by, to in order if to == rank]
        blocks = pair_channels(channels, 4)
        grouped = _C.transfer_kernels(mine, rank, world, channels, blocks)
        assert sorted(index for group in grouped for index in group) == list(range(len(mine)))
        assert all(len(group) * blocks <= channels for group in grouped)
        assert all(len({mine[i] for i in group}) == len(group) for group in grouped)
        plans.append([[mine[i] for i in group] for group in grouped])
    # Kernels run one after another and end when every transfer in them has its other side.
    done = [0] * world
    moved = True
    while moved:
        moved = False
        running = [plan[at] if at < len(plan) else [] for plan, at in zip(plans, done, strict=True)]
        for rank, group in enumerate(running):
            reached = all(
                _has_come(
                    plans[peer],
                    done[peer],
                    (not sends, rank),
                    _nth(plans[rank], done[rank], (sends, peer)),
                )
                for sends, peer in group
            )
            if group and reached:
                done[rank] += 1
                moved = True
    assert done == [len(plan) for plan in plans], "somebody waits for ever"


def _nth(plan: list[list[tuple[bool, int]]], at: int, pair: tuple[bool, int]) -> int:
    return sum(group.count(pair) for group in plan[: at + 1])


def _has_come(
    plan: list[list[tuple[bool, int]]], at: int, pair: tuple[bool, int], number: int
) -> bool:
    """Whether a rank's kernel with the n-th transfer of a pair runs or has run."""
    return _nth(plan, min(at, len(plan) - 1), pair) >= number


# ---- mistakes ------------------------------------------------------------------------------------


def mistakes(rank: Rank) -> list[Attempt]:
    some = torch.ones(4)
    with group_on_fake_gpu(rank, num_channels=1) as (group, _):
        alone = attempt(group.send, some, 1 - rank.rank)
    with group_on_fake_gpu(rank) as (group, _):
        return [
            alone,
            attempt(group.recv, some, None),
            attempt(group.all_gather, [some.numpy()] * rank.world_size, some),
            attempt(group.irecv, some.expand(2, 4), 0),
            attempt(group.isend, some, rank.rank),
        ]


def test_mistakes_are_refused(own_pools: Pools) -> None:
    for alone, anybody, mixed_places, expanded, own in own_pools(2).run(mistakes):
        assert own.kind == "UsageError"
        assert "1 and 0" in own.text
        assert alone.kind == "UnsupportedError"
        assert "2 resident thread blocks" in alone.text
        assert anybody.kind == "UnsupportedError"
        assert "name src" in anybody.text
        assert mixed_places.kind == "UsageError"
        assert "tensor is on cuda:0 and tensor_list on the CPU" in mixed_places.text
        assert expanded.kind == "UsageError"
    with pytest.raises(UnsupportedError, match="FASTCOLL_GPU_CHANNELS"):
        pair_channels(1, 4)


# ---- when something goes wrong -------------------------------------------------------------------


def desync(rank: Rank) -> tuple[Attempt, Attempt]:
    """Rank 0's kernel says that rank 1 called something else."""
    from fastcoll.gpu.verdicts import DESYNC

    with group_on_fake_gpu(rank) as (comm, core):
        for _ in range(66):  # more than are kept
            comm.all_reduce(torch.ones(3))
        core.launch = lambda *args: None  # type: ignore[method-assign]
        comm.all_reduce(torch.ones(4 + rank.rank))
        rank.comm.barrier()
        core.words = (DESYNC, 0, 1, 0, 67, 7, 8, 0)
        return attempt(comm.check), attempt(comm.all_reduce, torch.ones(3))


def test_a_desync_shows_both_calls(own_pools: Pools) -> None:
    for found, again in own_pools(2).run(desync):
        assert found.kind == again.kind == "DesyncError"
        assert "collective 67: rank" in found.text
        assert "called all_reduce(SUM, float32, numel=4)" in found.text
        assert "called all_reduce(SUM, float32, numel=5)" in found.text


def desync_of_messages(rank: Rank) -> tuple[Attempt, str]:
    """Rank 1's kernel says that rank 0 sends something else than it takes."""
    from fastcoll.gpu.verdicts import DESYNC

    with group_on_fake_gpu(rank) as (comm, core):
        for turn in range(9):  # more than are kept
            tensor = torch.ones(5)
            comm.send(tensor, 1, tag=turn) if comm.rank == 0 else comm.recv(tensor, 0, tag=turn)
        same = comm._gpus.group._journal.difference(0, 1)
        core.transfer = lambda *args: None  # type: ignore[method-assign]
        if comm.rank == 0:
            comm.send(torch.ones(4), 1, tag=7)
        else:
            comm.recv(torch.ones(6), 0, tag=7)
        rank.comm.barrier()
        core.words = (DESYNC, 1, 0, 0, 10, 7, 8, 0)
        return attempt(comm.check), same


def test_a_desync_shows_both_sides_of_a_message(own_pools: Pools) -> None:
    for found, same in own_pools(2).run(desync_of_messages):
        assert same == "", "equal messages are no difference"
        assert found.kind == "DesyncError"
        assert (
            "message 10 from rank 0 to rank 1: sent is float32, numel=4, tag=7, "
            "expected is float32, numel=6, tag=7"
        ) in found.text


def go_on(rank: Rank, how: str) -> tuple[list[float], list[int], bool]:
    """Rank 2 leaves while the others' kernels wait for it; they go on without it."""
    from tests.support.fake_gpu import fake_gpu

    results: list[float] = []
    with group_on_fake_gpu(rank) as (comm, core):
        comm.all_reduce(torch.ones(3))
        core.running = rank.rank != 2
        smaller = None
        if how == "abort":
            rank.comm.barrier()
            comm.abort("no more of this")
        elif rank.rank == 2:
            comm.close()
        elif how == "shrink":
            smaller = comm.shrink()
        else:
            attempt(comm.fail, 3, "somebody is late", (2,))
            comm.close()
    if smaller is not None:
        with fake_gpu(smaller):
            tensor = torch.full((3,), smaller.rank + 1.0)
            smaller.all_reduce(tensor)
            results = tensor.tolist()
        smaller.close()
    return results, core.lost, core.closed


@pytest.mark.parametrize("how", ["shrink", "abort", "close"])
def test_kernels_are_told_before_they_are_waited_for(own_pools: Pools, how: str) -> None:
    for results, lost, closed in own_pools(3).run(go_on, how)[:2]:
        assert results == ([3.0] * 3 if how == "shrink" else [])
        assert len(lost) == 1
        assert closed or how == "abort"


def lose(rank: Rank, how: str) -> tuple[list[Attempt], list[int]]:
    """Rank 2 leaves, when the others run a call that it has not made; or one that it has."""
    found: list[Attempt] = []
    with group_on_fake_gpu(rank) as (comm, core):
        comm.all_reduce(torch.ones(3))
        if rank.rank != 2 and how == "running":
            launch, core.launch = core.launch, lambda *args: None  # type: ignore[method-assign]
            comm.all_reduce(torch.ones(3))
            core.launch = launch  # type: ignore[method-assign]
        rank.comm.barrier()
        if rank.rank == 2:
            comm.close()
        else:
            found = look_around(dataclasses.replace(rank, comm=comm), core, how)
    return found, core.lost


def look_around(rank: Rank, core: Any, how: str) -> list[Attempt]:
    comm = rank.comm
    while not comm.peer_is_gone(2):
        time.sleep(0.005)
    pause_s = 0.02  # the peers are not looked at all the time
    time.sleep(pause_s)
    done = attempt(comm.check)  # it did its part
    time.sleep(pause_s)
    pair = attempt(comm.recv if comm.rank else comm.send, torch.ones(2), 1 - comm.rank)
    rank.tell(f"{how}: pair {rank.rank}")  # or an error would meet the other's half
    rank.wait_for(f"{how}: pair {1 - rank.rank}")
    time.sleep(pause_s)
    core.running = how != "starting"
    lost = attempt(comm.check) if core.running else attempt(comm.all_reduce, torch.ones(3))
    core.running = False
    return [done, pair, lost]


@pytest.mark.parametrize("how", ["running", "starting"])
def test_a_lost_rank_is_noticed_before_the_limit(own_pools: Pools, how: str) -> None:
    rows = own_pools(3).run(lose, how)[:2]
    assert {peer for _, told in rows for peer in told} == {2}, "no kernel was told"
    for (done, pair, lost), _ in rows:
        assert done.kind == "", "who did its part and left is no loss"
        assert pair.kind == "", "the others can still send"
        assert lost.kind == "PeerLostError"
        assert lost.ranks == (2,)
        assert lost.seconds < LATE_S


def test_who_did_its_part_is_not_lost_however_long_the_others_take(own_pools: Pools) -> None:
    for (*_, lost), told in own_pools(3).run(lose, "done")[:2]:
        assert lost.kind == "", lost.text
        assert told == []


def give_and_leave(rank: Rank, verb: str) -> Attempt:
    """Rank 0 gives something and leaves before the others ask for it."""
    with group_on_fake_gpu(rank) as (comm, _):
        tensor = torch.full((5,), 7.0 if rank.rank == 0 else 0.0)
        if rank.rank == 0:
            give = comm.broadcast if verb == "broadcast" else comm.send
            give(tensor, 0 if verb == "broadcast" else 1)
            return attempt(comm.close)
        while not comm.peer_is_gone(0):
            time.sleep(0.005)
        take = comm.broadcast if verb == "broadcast" else comm.recv
        if verb == "broadcast" or rank.rank == 1:
            take(tensor, 0)
            assert (tensor == 7.0).all()
        rank.tell(f"{verb}: rank {rank.rank} has it")
        rank.wait_for(f"{verb}: rank {3 - rank.rank} has it")  # before an error breaks the group
        return attempt(take, tensor, 0)


@pytest.mark.parametrize("verb", ["broadcast", "recv"])
def test_a_rank_that_gave_its_part_may_leave_before_it_is_taken(
    own_pools: Pools, verb: str
) -> None:
    for lost in own_pools(3).run(give_and_leave, verb)[1:]:
        assert (lost.kind, lost.ranks) == ("PeerLostError", (0,)), lost.text
