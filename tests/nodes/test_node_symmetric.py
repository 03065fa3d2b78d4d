# SPDX-License-Identifier: Apache-2.0
"""Symmetric tensors over nodes: all ranks hear of what one node lacks; groups that end."""

import resource
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import torch

from fastcoll.group.communicator import Communicator
from fastcoll.memory import region
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt
from tests.support.held import limited

FreshPool = Callable[[int, Setup], Pool]


def still_works(rank: Rank) -> None:
    """The group can be used, and so can symmetric tensors."""
    tensor = rank.comm.empty(1000, dtype=torch.float32)
    tensor.fill_(1.0)
    rank.comm.all_reduce(tensor)
    assert (tensor == rank.world_size).all()


def without_room(rank: Rank) -> Attempt:
    lacks = "it has none" if rank.rank == 3 else ""
    with patch.object(region, "_shortage", lambda *_: lacks):
        found = attempt(rank.comm.empty, 5000, dtype=torch.float64)
    still_works(rank)
    return found


def test_all_ranks_hear_of_a_node_without_room(fresh_pool: FreshPool) -> None:
    for one in fresh_pool(4, Setup(nodes="aabb")).run(without_room):
        assert one.kind == "DriverError", one
        assert "40000 bytes" in one.text
        assert "node 1" in one.text
        assert "ranks 2, 3" in one.text
        assert "rank 1: it has none" in one.text, "as its node counts the ranks"
        assert "node 0" not in one.text
        assert "can still be used" in one.text


def without_large_files(rank: Rank) -> list[Attempt]:
    with limited(resource.RLIMIT_FSIZE, 1 << 20) if rank.rank == 1 else nullcontext():
        found = [attempt(rank.comm.empty, 5000), attempt(rank.comm.new_group)]
    still_works(rank)
    return found


def test_all_ranks_hear_of_a_limit_of_one_rank(fresh_pool: FreshPool) -> None:
    for found in fresh_pool(3, Setup(nodes="aab")).run(without_large_files):
        for one in found:
            assert one.kind == "DriverError", one
            assert "rank 1" in one.text
            assert "RLIMIT_FSIZE is 1048576" in one.text
            assert one.seconds < LATE_S, one


def broken_meanwhile(rank: Rank) -> Attempt:
    if rank.rank == 3:  # its node breaks in the middle of the allocation

        def breaks(node_group: Communicator, num_bytes: int) -> int:
            node_group.abort("the test says so")
            node_group.check_host()
            return num_bytes

        with patch.object(Communicator, "add_shared_arena", breaks):
            return attempt(rank.comm.empty, 10)
    return attempt(rank.comm.empty, 10)


def test_a_node_that_breaks_meanwhile_breaks_the_group(fresh_pool: FreshPool) -> None:
    found = fresh_pool(4, Setup(nodes="aabb")).run(broken_meanwhile)
    assert {one.kind for one in found} == {"AbortedError"}, found
    assert len({one.text for one in found}) == 1, found
    assert max(one.seconds for one in found) < LATE_S


def use_a_closed_group(rank: Rank) -> list[Attempt]:
    """Rank 3 asks a group for memory, and aborts it, after it left; the others go on."""
    group, tensor = rank.comm.new_group(), torch.ones(4)
    if rank.rank == 3:
        group.close()
        found = [attempt(group.empty, 4), attempt(group.abort), attempt(group.send, tensor, 2)]
        rank.tell("rank 3 used its closed group")
    else:
        rank.wait_for("rank 3 used its closed group")
        others = [peer for peer in range(3) if peer != rank.rank]
        sent = [group.isend(tensor, peer) for peer in others]
        found = [attempt(group.recv, tensor, peer) for peer in others]
        found += [attempt(work.wait) for work in sent]
    return found


def test_a_closed_group_is_refused_and_breaks_nothing(fresh_pool: FreshPool) -> None:
    *others, odd = fresh_pool(4, Setup(nodes="aabb")).run(use_a_closed_group)
    for one in odd:
        assert one.kind == "UsageError", one
        assert "was destroyed" in one.text
    assert [one.kind for found in others for one in found] == [""] * 12
