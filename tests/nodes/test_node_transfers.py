# SPDX-License-Identifier: Apache-2.0
"""Sends and receives over nodes: failures, and many tags; contract/test_p2p.py has the others."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from fastcoll.nodes.transfers import channels
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt

LIMIT_S = 3.0
Clusters = Callable[[str], Pool]
TAGS = 30
FreshPool = Callable[[int, Setup], Pool]


def cluster(fresh_pool: FreshPool, nodes: str = "abb") -> Pool:
    return fresh_pool(len(nodes), Setup(nodes=nodes, timeout_s=LIMIT_S))


def other_size(rank: Rank, source: int | None) -> Attempt:
    """Rank 2 waits for something else: in a barrier, or for a message from any rank."""
    if rank.rank == 0:
        return attempt(rank.comm.send, torch.ones(4), 1)
    if rank.rank == 1:
        return attempt(rank.comm.recv, torch.ones(5), source)
    if source is None:
        return attempt(rank.comm.recv, torch.ones(1), tag=5)
    time.sleep(0.3)
    return attempt(rank.comm.barrier)


@pytest.mark.parametrize("source", [0, None])
def test_messages_that_do_not_fit_are_seen(fresh_pool: FreshPool, source: int | None) -> None:
    found = cluster(fresh_pool).run(other_size, source)
    assert {one.kind for one in found} == {"DesyncError"}, found
    assert len({one.text for one in found}) == 1
    assert "rank 0 sent 4 elements of float32, rank 1 expected 5" in found[0].text


def other_size_on_a_node(rank: Rank) -> Attempt:
    """Ranks 1 and 2, which are 0 and 1 on their node; rank 0 waits in a barrier."""
    if rank.rank == 1:
        rank.comm.send(torch.ones(4), 2)
    if rank.rank == 2:
        return attempt(rank.comm.recv, torch.ones(5), 1)
    return attempt(rank.comm.barrier)


def test_messages_that_do_not_fit_on_a_node_name_the_groups_ranks(fresh_pool: FreshPool) -> None:
    found = cluster(fresh_pool).run(other_size_on_a_node)
    assert {one.kind for one in found} == {"DesyncError"}, found
    assert len({one.text for one in found}) == 1
    assert "ranks [0, 1] are ranks [1, 2] of the group: rank 0 sends 4 x float32" in found[0].text


def unmatched(rank: Rank) -> Attempt:
    """While a send fails beside it, rank 2 waits in a call, for rank 1, which waits for rank 0."""
    if rank.rank == 0:
        time.sleep(2)
    if rank.rank == 2:
        rank.comm.isend(torch.ones(4), 0, tag=3, timeout_s=0.5)
    first = attempt(rank.comm.barrier)
    # All that rank 0 needs of the first had been sent by then.
    return first if first.kind else attempt(rank.comm.barrier)


def test_a_send_that_nobody_takes_ends_at_the_limit(fresh_pool: FreshPool) -> None:
    found = cluster(fresh_pool).run(unmatched)
    assert {one.kind for one in found} == {"CollectiveTimeout"}, found
    assert {one.ranks for one in found} == {(0,)}
    assert all("send to rank 0 with tag 3" in one.text for one in found)
    assert max(one.seconds for one in found) < LIMIT_S


def leaves_its_node(rank: Rank) -> Attempt | None:
    with rank.comm.new_group() as group:
        group.all_reduce(torch.ones(3))
        return attempt(group.recv, torch.ones(4), 1) if rank.rank == 0 else None


def test_a_transfer_that_fails_in_a_node_is_named(clusters: Clusters) -> None:
    found = clusters("aab").run(leaves_its_node)[0]
    assert (found.kind, found.ranks) == ("PeerLostError", (1,))
    assert found.text.startswith('transfer in group "'), found.text
    assert "recv(float32, numel=4, src=1" in found.text


def makes_no_carrier(rank: Rank) -> Attempt:
    """Rank 1 can't make a connection, as where no thread can be had."""
    if rank.rank == 2:
        return attempt(rank.comm.recv, torch.ones(1), 1)
    ends = rank.comm._transfers._ends
    if rank.rank == 1:
        object.__setattr__(ends, "make", mock.Mock(side_effect=RuntimeError("no thread")))
        return attempt(rank.comm.send, torch.ones(1), 0)
    return attempt(rank.comm.recv, torch.ones(1), 1)


def test_a_connection_that_can_not_be_made_is_no_late_peer(fresh_pool: FreshPool) -> None:
    for one in cluster(fresh_pool).run(makes_no_carrier):
        assert (one.kind, one.ranks) == ("PeerLostError", (0, 1)), one
        assert "one of ranks [0, 1] can't connect: no thread" in one.text, one


def without_a_connection(
    rank: Rank, verb: str, dead: Sequence[int], waiting: Mapping[int, int | None]
) -> Attempt | None:
    """Some ranks die, some wait for another one, or for any; the others are elsewhere."""
    rank.comm.barrier()
    if rank.rank in dead:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.rank not in waiting:
        return None
    return attempt(getattr(rank.comm, verb), torch.ones(1), waiting[rank.rank])


@pytest.mark.parametrize(
    ("dead", "waiting"),
    [([3], {0: 3, 2: 1}), ([3], {0: 3}), ([2, 3], {0: 3})],
    ids=["its node waits", "its node computes", "its node is dead"],
)
@pytest.mark.parametrize("verb", ["recv", "send"])
def test_a_dead_rank_of_another_lane_is_named_soon(
    fresh_pool: FreshPool, verb: str, dead: list[int], waiting: dict[int, int]
) -> None:
    """Rank 0 has no connection to rank 3. Rank 2 sees its death if it waits itself."""
    pool = fresh_pool(4, Setup(nodes="aabb", timeout_s=3 * LATE_S))
    outcomes = pool.outcomes(without_a_connection, verb, dead, waiting)
    for found in [outcomes[rank].value for rank in waiting]:
        assert (found.kind, found.ranks) == ("PeerLostError", (3,)), found
        assert f"{verb} {'to' if verb == 'send' else 'from'} rank 3 with tag 0" in found.text
        assert found.seconds < LATE_S


LONG = 100_000_000  # elements: more than the sockets hold, by far


def in_the_middle(rank: Rank, verb: str, peer: int) -> Attempt | None:
    """Rank 0 and a peer are in a message, in whose middle the peer is killed by the receiver."""
    pid = torch.tensor([os.getpid()])
    rank.comm.broadcast(pid, peer)
    if rank.rank not in (0, peer):
        return None
    receives = (verb == "recv") == (rank.rank == 0)
    tensor = (torch.zeros if receives else torch.ones)(LONG)

    def kill() -> None:
        while tensor[0] == 0:
            pass
        os.kill(int(pid), signal.SIGKILL)

    if receives:
        threading.Thread(target=kill, daemon=True).start()
    move = rank.comm.recv if receives else rank.comm.send
    return attempt(move, tensor, peer - rank.rank)


@pytest.mark.parametrize(("nodes", "peer"), [("ab", 1), ("aab", 2), ("abb", 2)])
@pytest.mark.parametrize("verb", ["recv", "send"])
def test_a_rank_that_dies_in_the_middle_of_a_message_is_named_soon(
    fresh_pool: FreshPool, verb: str, nodes: str, peer: int
) -> None:
    """Gloo does not tell the transfer in whose middle a connection breaks."""
    pool = fresh_pool(len(nodes), Setup(nodes=nodes, timeout_s=3 * LATE_S))
    found = pool.outcomes(in_the_middle, verb, peer)[0].value
    assert (found.kind, found.ranks) == ("PeerLostError", (peer,)), found
    assert found.seconds < 2 * LATE_S, found


def test_a_receive_from_any_rank_ends_when_all_others_are_dead(fresh_pool: FreshPool) -> None:
    pool = fresh_pool(4, Setup(nodes="aabb", timeout_s=3 * LATE_S))
    found = pool.outcomes(without_a_connection, "recv", [1, 2, 3], {0: None})[0].value
    assert (found.kind, found.ranks) == ("PeerLostError", (1, 2, 3)), found
    assert "recv from any rank with tag 0 (seen by rank 0) lost ranks [1, 2, 3]" in found.text
    assert found.seconds < LATE_S


# ---- many tags -----------------------------------------------------------------------------------


def num_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def tag_by_tag(rank: Rank, most: int) -> list[int]:
    """Ranks 0 and 2 give each other messages of many tags, which come again; some from any rank."""
    with mock.patch.object(channels, "MOST_CARRIERS", most), rank.comm.new_group() as group:
        threads = [num_threads()]
        for turn in range(2) if rank.rank != 1 else ():
            peer = 2 - rank.rank
            for tag in range(TAGS):
                size = (1, 5000)[tag % 2]
                given, got = torch.full((size,), 100.0 * turn + tag), torch.zeros(size)
                source = None if (tag + turn) % 3 == 0 else peer
                for work in (group.isend(given, peer, tag), group.irecv(got, source, tag)):
                    work.wait()
                assert torch.equal(given, got)
            assert len(group._transfers._ends.sending) == min(most, TAGS)
            threads.append(num_threads())
        group.barrier()
    return threads


@pytest.mark.parametrize("most", [3, 64])
def test_many_tags_need_few_threads(clusters: Clusters, most: int) -> None:
    for first, *later in clusters("aab").run(tag_by_tag, most)[::2]:
        carriers = 2 * min(most, TAGS)  # to send on, and to receive on
        ended = 16 if most < TAGS else 0  # the last ones are kept
        most_threads = 2 * (carriers + ended)  # a carrier has two; some channels have a queue
        assert max(later) <= first + most_threads + 8


def closed_one_by_one(rank: Rank) -> list[int]:
    """Groups that are used and closed by a program that collects no garbage."""
    gc.disable()
    try:
        threads = []
        for _ in range(4):
            with rank.comm.new_group() as group:
                peer = (rank.rank + 1) % 2
                for work in (group.irecv(torch.ones(3), peer), group.isend(torch.ones(3), peer)):
                    work.wait()
                group.all_reduce(torch.ones(3))
            del work
            threads.append(num_threads())
        return threads
    finally:
        gc.enable()


def test_closed_groups_give_their_threads_back_at_once(clusters: Clusters) -> None:
    for first, *_, last in clusters("ab").run(closed_one_by_one):
        assert last <= first + 1  # a thread of Python's queue may be new


LARGE = 2_000_000  # more than a socket holds: some of it is on its way when the sender is through


def each_ends_its_carrier(rank: Rank) -> list[tuple[int, float]]:
    """Ranks 0 and 1 send from another node, for receives from any rank and from themselves."""
    found = []
    with mock.patch.object(channels, "MOST_CARRIERS", 0), rank.comm.new_group() as group:
        for number in range(6) if rank.rank < 2 else ():
            group.send(torch.full((LARGE,), float(number)), 2)
        for source in [1, None] * 3 + [None] * 6 if rank.rank == 2 else ():
            tensor = torch.zeros(LARGE)
            found.append((group.recv(tensor, source), tensor.unique().item()))
        group.barrier()
    return found


def test_a_message_may_end_its_carrier(clusters: Clusters) -> None:
    *_, found = clusters("aab").run(each_ends_its_carrier)
    for sender in (0, 1):
        assert [number for peer, number in found if peer == sender] == [0, 1, 2, 3, 4, 5]
