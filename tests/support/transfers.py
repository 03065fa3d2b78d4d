# SPDX-License-Identifier: Apache-2.0
"""Programs that send and receive through torch.distributed, each right on any backend.

Those of `LIKE_GLOO` return what Gloo gives too; the others return what is checked here.
"""

import gc
import time
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support.harness import LATE_S, Attempt, Rank, attempt

LARGE = 1 << 20  # more than a sender can put down without its receiver


def tags(rank: Rank) -> list[Any]:
    """Send messages of several tags to the next rank in one order, receive them in another."""
    me, world = rank.rank, rank.world_size
    after, before = (me + 1) % world, (me - 1) % world
    sends = [
        dist.isend(torch.full((3,), 100 * me + 10 * tag + turn), after, tag=tag)
        for turn in range(2)
        for tag in (3, 1, 2)
    ]
    results = []
    for tag in (1, 2, 3):
        for _ in range(2):
            tensor = torch.empty(3, dtype=torch.int64)
            results.append((dist.recv(tensor, before, tag=tag), tensor))
    for work in sends:
        assert work is not None
        work.wait()
    return results


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


def among_collectives(rank: Rank) -> list[Any]:
    """Keep transfers in flight while collectives run and wait, in both directions."""
    me, world = rank.rank, rank.world_size
    after, before = (me + 1) % world, (me - 1) % world
    results = []
    for turn in range(5):
        taken, total = torch.zeros(LARGE), torch.full((100,), float(me + turn))
        receive = dist.irecv(taken, before, tag=turn)
        reduce = dist.all_reduce(total, async_op=True)
        send = dist.isend(torch.full((LARGE,), float(me)), after, tag=turn)
        dist.barrier()
        mine = torch.tensor([me])
        dist.all_reduce(mine)
        for work in (reduce, send, receive):
            assert work is not None
            work.wait()
        results += [taken.sum(), total, mine]
    return results


def unattended(rank: Rank) -> list[Any]:
    """Receive in a busy rank, and more bytes than a sender can put into its channel."""
    sent, started = (f"{dist.get_backend()} {what}" for what in ("sent", "started"))
    tensor = torch.zeros(LARGE)
    if rank.rank == 0:
        rank.wait_for(started)
        dist.send(tensor + 3, 1)
        rank.tell(sent)
    elif rank.rank == 1:
        work = dist.irecv(tensor, 0)
        rank.tell(started)
        rank.wait_for(sent)
        assert work is not None
        work.wait()
    return [tensor]


LIKE_GLOO = (tags, any_source, among_collectives, unattended)


def kinds(rank: Rank) -> list[Any]:
    """Send every size, type and layout both ways at once: one by one, then all in a batch."""
    me, world = rank.rank, rank.world_size
    after, before = (me + 1) % world, (me - 1) % world

    def given(by: int) -> list[torch.Tensor]:
        return [
            torch.arange(LARGE) + by,
            (torch.arange(10) + by).reshape(5, 2)[:, 0],
            (torch.arange(12) + by).reshape(3, 4).t(),
            torch.zeros(0),
            torch.tensor(by == 0),
            torch.arange(4).to(torch.bfloat16) + by,
            torch.arange(4).to(torch.complex64) + by,
            torch.arange(4).to(torch.float8_e5m2),
        ]

    for in_batch in (False, True):
        sent, taken = given(me), [torch.zeros_like(tensor) for tensor in given(0)]
        if in_batch:
            ops = [dist.P2POp(dist.irecv, tensor, before) for tensor in taken]
            ops += [dist.P2POp(dist.isend, tensor, after) for tensor in sent]
            works = dist.batch_isend_irecv(ops)
        else:
            works = [dist.isend(tensor, after) for tensor in sent]  # type: ignore[misc]
            works += [dist.irecv(tensor, before) for tensor in taken]  # type: ignore[misc]
        for work in works:
            work.wait()
        for tensor, right in zip(taken, given(before), strict=True):
            assert tensor.tolist() == right.tolist()
    return []


def handles(rank: Rank) -> list[Any]:
    """Check the Work of a transfer before the transfer is over, and after."""
    peer, tensor = 1 - rank.rank, torch.full((LARGE,), float(rank.rank))
    if rank.rank == 1:
        rank.wait_for("looked")
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return []
    work = dist.irecv(tensor)
    assert work is not None
    late = attempt(work.wait, timedelta(seconds=0.2))
    assert late.kind == "CollectiveTimeout", late
    assert late.text == "the transfer is not complete after 0.2 s; it goes on"
    assert not work.is_completed()
    assert not work.is_success()
    assert work.exception() is None
    future = work.get_future()
    rank.tell("looked")
    [output] = future.then(lambda done: done.value()).wait()
    assert output.data_ptr() == tensor.data_ptr()
    assert (tensor == 1).all()
    assert work.wait(timedelta(seconds=20))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.source_rank() == 1
    assert work.result()[0].data_ptr() == tensor.data_ptr()
    dist.send(tensor, peer)
    return []


def dropped(rank: Rank) -> list[Any]:
    """Check that messages arrive whose sender dropped the handle and the memory."""
    if rank.rank == 0:
        for turn in range(4):
            dist.isend(torch.full((LARGE,), float(turn)), 1, tag=turn)
        others = [torch.full((LARGE,), -1.0) for _ in range(8)]  # would get that memory
        rank.tell("sent")
        dist.barrier()
        return others[:0]
    rank.wait_for("sent")
    taken = [torch.empty(LARGE) for _ in range(4)]
    for turn in (3, 1, 0, 2):
        dist.recv(taken[turn], 0, tag=turn)
    dist.barrier()
    return [tensor.unique().tolist() for tensor in taken]


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
    from fastcoll.api.groups import communicator_of

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
    """Check what the ranks of one of the programs above were told."""
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
