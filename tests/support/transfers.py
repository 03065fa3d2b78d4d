# SPDX-License-Identifier: Apache-2.0
"""Transfers of torch.distributed that fail, and those that only torch's groups have.

Transfers that succeed stand in contract/test_p2p.py, for every kind of group.
"""

import gc
import time
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastcoll.api.groups import communicator_of
from tests.support.harness import LATE_S, Attempt, Rank, attempt

LARGE = 1 << 20  # more than a sender can put down without its receiver


def any_source(rank: Rank) -> list[Any]:
    """Receive from any source, in a group whose ranks have other names in the world."""
    me, last = rank.rank, rank.world_size - 1
    group = dist.new_group([1, 0] if last == 1 else [last, 1])
    results = []
    if me == last:
        expected = {}
        for tag in (7, 5):
            tensor = torch.empty(2)
            source = dist.recv(tensor, group=group, tag=tag)
            expected[tag] = (source, tensor)
        work = dist.irecv(torch.empty(2), group=group)
        work.wait()
        results = [expected[5], expected[7], work._source_rank()]
    elif me in dist.get_process_group_ranks(group):
        for work in [
            dist.isend(torch.full((2,), float(tag)), last, group, tag) for tag in (5, 7, 0)
        ]:
            assert work is not None
            work.wait()
    dist.barrier()
    return results


def wrong_by_itself(rank: Rank) -> list[Attempt]:
    """Make transfers that are refused before a byte is sent; the group goes on."""
    peer, group = 1 - rank.rank, dist.group.WORLD
    assert group is not None
    tensor = torch.ones(4)
    seen = [
        attempt(dist.isend, tensor, peer, tag=-1),
        attempt(group.send, [tensor], 2, 0),
        attempt(group.recv, [tensor], -1, 0),
        attempt(dist.irecv, torch.ones(1).expand(4), peer),
    ]
    works = [dist.isend(tensor * rank.rank, peer), dist.irecv(tensor, peer)]
    for work in works:
        assert work is not None
        work.wait()
    assert tensor[0] == peer
    return seen


def other_types(rank: Rank) -> list[Attempt]:
    """Receive another dtype than is sent: a waiting rank gets the error from every question."""
    peer, group = 1 - rank.rank, dist.new_group()
    if rank.rank == 0:
        work = dist.isend(torch.ones(LARGE), peer, group)
    else:
        work = dist.irecv(torch.ones(LARGE, dtype=torch.int32), peer, group)
    assert work is not None
    seen = [attempt(work.wait), attempt(work.wait), attempt(work.result)]
    future = work.get_future()
    seen += [attempt(future.wait), attempt(future.wait)]
    error = work.exception()
    assert work.is_completed()
    assert not work.is_success()
    seen.append(Attempt(type(error).__name__, str(error), 0))
    seen += [attempt(dist.isend, torch.ones(1), peer, group), attempt(dist.barrier, group)]
    dist.barrier()  # no rank leaves before
    return seen


def left_open(rank: Rank) -> list[Attempt]:
    """Destroy a group with an open receive, whose handle keeps the parts that it needs."""
    group = dist.new_group()
    comm = weakref.ref(communicator_of(group))  # type: ignore[arg-type]
    work = dist.irecv(torch.ones(4), rank.rank, group)  # from itself, which does not leave earlier
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    assert work is not None
    seen = [attempt(work.wait), attempt(work.wait)]
    while (kept := comm()) is not None and kept._transfers._has_thread:  # that lets go of it, too
        del kept
        time.sleep(0.01)
    del kept
    gc.collect()
    assert comm() is not None
    del work
    end = time.monotonic() + LATE_S
    while comm() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert comm() is None
    return seen


def nobody_sends(rank: Rank) -> list[Attempt]:
    """Check the group's timeout of a receive from a rank, one from any, and one in a batch."""
    groups = [dist.new_group(timeout=timedelta(seconds=1)) for _ in range(3)]
    seen = []
    if rank.rank == 0:
        tensor = torch.ones(4)
        seen.append(attempt(dist.recv, tensor, 1, groups[0]))
        seen.append(attempt(dist.recv, tensor, group=groups[1]))
        [work] = dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 1, groups[2])])
        seen.append(attempt(work.wait))
    dist.barrier()
    return seen


def check_errors(name: str, rows: list[list[Attempt]]) -> None:
    """Check the errors of the ranks of one of the programs above."""
    for one in (one for row in rows for one in row):
        assert one.seconds < LATE_S, one
    if name == "wrong_by_itself":
        for row in rows:
            for word, one in zip(("tag=-1", "dst=2", "src=-1", "expanded"), row, strict=True):
                assert one.kind == "UsageError", one
                assert word in one.text, one
    elif name == "other_types":
        for one in (one for row in rows for one in row):
            assert one.kind == "DesyncError", one
            assert "float32 to rank 1, which receives" in one.text
            assert "int32" in one.text
    elif name == "left_open":
        for one in (one for row in rows for one in row):
            assert one.kind == "UsageError", one
            assert "destroyed before the transfer was complete" in one.text
    else:
        [first, other] = rows
        assert other == []
        assert [one.kind for one in first] == ["CollectiveTimeout"] * 3, first
        for one in first:
            assert one.ranks == (1,), one
            assert "did not send it" in one.text
