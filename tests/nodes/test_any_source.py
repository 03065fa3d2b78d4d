# SPDX-License-Identifier: Apache-2.0
"""Receives from any rank over nodes: whose a message is, and ends; see contract/test_p2p.py."""

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch

from fastcoll.calls.arrays import view
from fastcoll.calls.transfers import ANY, Transfer, TransferCall
from fastcoll.errors import FastcollError
from fastcoll.nodes.transfers.turns import Turns
from tests.nodes.test_node_transfers import LIMIT_S, Clusters, FreshPool, cluster
from tests.support.harness import LATE_S, Attempt, Rank, Setup, attempt

TAG, GO = 5, 6


def whose_turn(rank: Rank) -> None:
    """Two messages from rank 2, which both of two receives fit: the first is the first one's.

    Then one of this node, and what several receives leave over, strided and empty.
    """
    me, comm = rank.rank, rank.comm
    if me == 2:
        for number in range(4):
            comm.send(torch.tensor([float(number)]), 0, tag=TAG)
        comm.recv(torch.ones(1), 0, tag=GO)
        comm.send(torch.zeros(0), 0, tag=TAG)
        comm.send(torch.arange(3.0), 0, tag=TAG)
    if me == 1:
        comm.recv(torch.ones(1), 0, tag=GO)
        comm.send(torch.tensor([7.0]), 0, tag=TAG)
    if me != 0:
        return
    got = [torch.zeros(1) for _ in range(5)]
    sources = (2, None, None, 2)
    works = [comm.irecv(got[i], sources[i], TAG) for i in range(4)]
    works.append(comm.irecv(got[4], None, TAG))  # listens to rank 2 until rank 1 sends
    for work in works[:4]:
        work.wait()
    assert [float(one) for one in got[:4]] == [0.0, 1.0, 2.0, 3.0]
    comm.send(torch.ones(1), 1, tag=GO)
    works[4].wait()
    assert float(got[4]) == 7.0
    assert [work.source_rank() for work in works] == [2, 2, 2, 2, 1]
    comm.send(torch.ones(1), 2, tag=GO)
    assert comm.recv(torch.ones(0), 2, tag=TAG) == 2  # the channel was listened to
    strided = torch.zeros(6)
    assert comm.irecv(strided[::2], None, TAG).result()[0].tolist() == [0.0, 1.0, 2.0]
    assert not strided[1::2].any()


def test_a_message_is_for_the_first_receive_that_it_fits(clusters: Clusters) -> None:
    clusters("aabb").run(whose_turn)


def started_by_two_threads(rank: Rank, source: int | None) -> list[float]:
    """A thread of rank 1 is held up while it starts a receive, and another thread starts one."""
    tensors = [torch.zeros(1), torch.zeros(1)]
    if rank.rank == 0:
        works = [rank.comm.isend(torch.full((1,), 1.0 + number), 1, tag=7) for number in range(2)]
        for work in works:
            work.wait()
    else:
        usual, is_held_up, works = Turns.enter, threading.Event(), []

        def enter(turns: Turns, receive: Transfer) -> None:
            usual(turns, receive)
            if not is_held_up.is_set():
                is_held_up.set()
                time.sleep(0.3)

        def start(number: int) -> None:
            works.append(rank.comm.irecv(tensors[number], source, tag=7))

        with mock.patch.object(Turns, "enter", enter):
            first = threading.Thread(target=start, args=(0,))
            first.start()
            is_held_up.wait()
            start(1)
            first.join()
        for work in works:
            work.wait()
    rank.comm.barrier()
    return [tensor.item() for tensor in tensors]


@pytest.mark.parametrize("source", [0, None])
def test_threads_start_receives_in_one_order(fresh_pool: FreshPool, source: int | None) -> None:
    pool = fresh_pool(2, Setup(nodes="ab", timeout_s=LATE_S))
    assert pool.run(started_by_two_threads, source)[1] == [1.0, 2.0]


def threads_of_closed_groups(rank: Rank) -> list[int]:
    """Each group is closed while this rank listens to a sender that sends nothing more."""
    found = []
    for _ in range(5):
        group = rank.comm.new_group()
        if rank.rank == 0:
            for _ in (2, 3):
                group.recv(torch.ones(1))
            last = group.irecv(torch.ones(1))  # listens to ranks 2 and 3 until rank 1 sends
            time.sleep(0.2)
            group.send(torch.ones(1), 1, tag=GO)
            last.wait()
            del last
        elif rank.rank == 1:
            group.recv(torch.ones(1), 0, tag=GO)
            group.send(torch.ones(1), 0)
        else:
            group.send(torch.ones(1), 0)
        group.barrier()
        group.close()
        del group
        rank.comm.barrier()
        gc.collect()
        found.append(len(list(Path("/proc/self/task").iterdir())))
    return found


def test_closed_groups_keep_no_threads(clusters: Clusters) -> None:
    first, *_, last = clusters("aabb").run(threads_of_closed_groups)[0]
    assert last <= first + 4  # the last groups' carriers, until another group is closed


def test_turns() -> None:
    array = view(torch.ones(1), "tensor")
    receives = [Transfer(False, array, peer, TAG, 1.0) for peer in (3, ANY, 3, 4, ANY)]
    turns = Turns()
    for receive in receives:
        turns.enter(receive)

    def whose(peer: int) -> list[int]:
        return [i for i, one in enumerate(receives) if i not in left and turns.is_next(one, peer)]

    left: set[int] = set()
    for over, expected in ((None, (0, 1)), (0, (1, 1)), (1, (2, 3)), (3, (2, 4)), (2, (4, 4))):
        if over is not None:
            turns.leave(receives[over])
            left.add(over)
        assert (whose(3), whose(4)) == ([expected[0]], [expected[1]])


def a_sender_leaves(rank: Rank) -> None:
    """Rank 2 leaves the group after its message: rank 0, which listened to it, hears rank 1."""
    group = rank.comm.new_group()
    tensor = torch.zeros(1)
    if rank.rank == 2:
        group.send(torch.tensor([2.0]), 0)
        group.close()
    if rank.rank == 0:
        assert group.recv(tensor) == 2
    if rank.rank != 2:
        # Rank 2 has been received from, so it is gone when it says so.
        if rank.rank == 0:
            later = group.irecv(tensor)
            rank.comm.recv(torch.ones(1), 2, tag=GO)
            group.send(torch.ones(1), 1, tag=GO)
            later.wait()
            assert later.source_rank() == 1
        else:
            group.recv(torch.ones(1), 0, tag=GO)
            group.send(torch.tensor([1.0]), 0)
        group.close()
    else:
        rank.comm.send(torch.ones(1), 0, tag=GO)


def test_a_sender_that_left_is_no_loss(clusters: Clusters) -> None:
    clusters("aab").run(a_sender_leaves)


def nobody_sends(rank: Rank) -> Attempt:
    tensor = torch.ones(1)
    if rank.rank == 0:
        rank.comm.recv(tensor)  # connects to rank 1, which sends no more
        return attempt(rank.comm.recv, tensor, timeout_s=0.5)
    if rank.rank == 1:
        rank.comm.send(tensor, 0)
    return attempt(rank.comm.barrier)


def test_a_receive_without_a_sender_ends_at_the_limit(fresh_pool: FreshPool) -> None:
    found = cluster(fresh_pool).run(nobody_sends)
    assert {one.kind for one in found} == {"CollectiveTimeout"}, found
    assert {one.ranks for one in found} == {(1, 2)}
    assert all("recv from any rank with tag 0 (seen by rank 0)" in one.text for one in found)


def closed(rank: Rank) -> list[Any]:
    """A group that is closed with a receive open, which listens; then all goes on in the other.

    Each rank is the first one to leave once: the last one may hear that all others have left.
    """
    found = []
    for first in range(rank.world_size):
        group = rank.comm.new_group()
        if rank.rank == 0:
            group.recv(torch.ones(1))
        if rank.rank == 1:
            group.send(torch.ones(1), 0)
        late = group.irecv(torch.ones(1))
        if rank.rank == first:
            group.close()
            found = [attempt(late.wait).kind, cast(Any, late).is_success()]
        rank.comm.barrier()
        group.close()
    return found


def test_closing_ends_it(clusters: Clusters) -> None:
    assert clusters("aab").run(closed) == [["UsageError", False]] * 3


def from_another_node_alone(rank: Rank) -> list[float]:
    """All ranks of the receiver's own node have left the group when the message comes."""
    group = rank.comm.new_group()
    value = torch.zeros(1)
    receiving = group.irecv(value) if rank.rank == 1 else None
    if rank.rank == 0:
        group.close()
    rank.comm.barrier()
    if rank.rank == 2:
        time.sleep(0.3)  # in which the receiver looks for lost peers
        group.send(torch.ones(1), 1)
    if receiving is not None:
        receiving.wait()
    rank.comm.barrier()
    return value.tolist()


def test_another_node_may_send_when_the_own_node_has_left(clusters: Clusters) -> None:
    assert clusters("aab").run(from_another_node_alone)[1] == [1.0]


def refused(rank: Rank, source: int | None, error: BaseException) -> list[float]:
    """The first receive finds no thread; the message is for the next one, with the same tag."""
    me, comm, value = rank.rank, rank.comm, torch.zeros(1)
    if me == 0:
        with mock.patch("fastcoll.calls.work.run_in_pool", side_effect=error):
            assert attempt(comm.irecv, torch.ones(1), source, TAG).kind == type(error).__name__
    comm.barrier()
    if me == (1 if source is None else source):
        comm.send(torch.tensor([3.0]), 0, tag=TAG)
    if me == 0:
        comm.recv(value, source, tag=TAG, timeout_s=LIMIT_S)
    return value.tolist()


@pytest.mark.parametrize("error", [FastcollError("no thread"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("source", [2, None])
def test_a_receive_that_was_refused_takes_no_turn(
    fresh_pool: FreshPool, source: int | None, error: BaseException
) -> None:
    assert cluster(fresh_pool, "aab").run(refused, source, error)[0] == [3.0]


def closed_meanwhile(rank: Rank) -> str:
    """The transfers end when a receive from any rank is checked, but has not begun."""
    group = rank.comm.new_group()
    transfers = cast(Any, group)._transfers
    check = transfers._checked

    def check_late(call: TransferCall) -> object:
        checked = check(call)
        transfers.close()
        return checked

    with mock.patch.object(transfers, "_checked", check_late):
        return attempt(group.recv, torch.ones(1)).kind


def test_a_receive_that_begins_behind_the_end_ends(fresh_pool: FreshPool) -> None:
    assert cluster(fresh_pool, "aab").run(closed_meanwhile) == ["UsageError"] * 3


def let_go_while_listening(rank: Rank, fails: bool) -> bool:
    """Rank 0 listens to rank 2 when its group is collected; rank 2 has its own for longer.

    The group had an error and an end, or neither.
    """
    group = rank.comm.new_group()
    if rank.rank == 2:
        group.send(torch.ones(1), 0)
    if rank.rank == 1:
        rank.wait_for("rank 0 listens")
        group.abort() if fails else group.send(torch.ones(1), 0)
    if rank.rank == 0:
        assert group.recv(torch.ones(1)) == 2
        work = group.irecv(torch.ones(1))
        [channel] = group._transfers._channels.values()
        while channel._header is None:
            time.sleep(0.01)
        rank.tell("rank 0 listens")
        assert attempt(work.wait).kind == ("AbortedError" if fails else "")
        if fails:
            group.close()
        there = weakref.ref(channel)
        del group, work, channel
        gc.collect()
        rank.tell("rank 0 let go")
        return there() is None
    rank.wait_for("rank 0 let go")
    return not group.closed


@pytest.mark.parametrize("fails", [True, False])
def test_a_group_that_listens_can_be_let_go(fresh_pool: FreshPool, fails: bool) -> None:
    """Else Gloo's end would wait, in the garbage collection, until rank 2 lets go."""
    assert cluster(fresh_pool, "aab").run(let_go_while_listening, fails) == [True] * 3
