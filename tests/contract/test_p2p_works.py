# SPDX-License-Identifier: Apache-2.0
"""The handles of sends and receives, at every site; and that transfers need nobody's attention."""

import gc
import random
import time
import weakref
from datetime import timedelta

import numpy as np
import torch

from tests.contract.test_p2p import LARGE
from tests.support.harness import Pools, Rank, attempt
from tests.support.sites import EACH_KIND, Site, at, each_kind


def dropped(rank: Rank) -> list[float]:
    """Neither the Works nor the tensors of rank 0's sends are kept."""
    comm, last = rank.comm, rank.world_size - 1
    if rank.rank == 0:
        for turn in range(4):
            comm.isend(torch.full((LARGE,), float(turn)), last, tag=turn)
        gc.collect()
        others = [torch.full((LARGE,), -1.0) for _ in range(8)]  # would get that memory
        rank.tell("sent and dropped")
        comm.barrier()
        return [others[0][0].item()]
    taken = [torch.empty(LARGE) for _ in range(4)]
    if rank.rank == last:
        rank.wait_for("sent and dropped")
        for turn in (3, 1, 0, 2):
            comm.recv(taken[turn], 0, tag=turn)
    comm.barrier()
    return [value for one in taken for value in one.unique().tolist()]


@each_kind
def test_a_dropped_send_still_arrives(site: Site) -> None:
    assert site.run(dropped)[-1] == [0.0, 1.0, 2.0, 3.0]


def busy_receiver(rank: Rank) -> float:
    """More than a sender can put down, to the last rank, which does something else meanwhile."""
    tensor, last = torch.zeros(LARGE), rank.world_size - 1
    if rank.rank == 0:
        rank.wait_for("receive started")
        rank.comm.send(tensor + 3, last)
        rank.tell("all is sent")
    elif rank.rank == last:
        work = rank.comm.irecv(tensor, 0)
        rank.tell("receive started")
        rank.wait_for("all is sent")
        work.wait()
    return tensor.mean().item()


@each_kind
def test_a_receiver_may_do_something_else(site: Site) -> None:
    assert site.run(busy_receiver)[-1] == 3.0


def unattended(rank: Rank, rounds: int) -> list[float]:
    """Rank 0 receives messages that it does not wait for.

    Its calls come around the time for which its thread stays. Every message is moved on by that
    thread or by its successor.
    """
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


def handles(rank: Rank) -> None:
    """A Work of rank 0 before, during and after its transfer from the last rank."""
    comm, last = rank.comm, rank.world_size - 1
    tensor = torch.full((LARGE,), float(rank.rank))
    if rank.rank == last:
        rank.wait_for("looked at the handle")
        comm.send(tensor, 0, tag=6)
    if rank.rank > 0:
        return
    work = comm.irecv(tensor, None, tag=6)
    late = attempt(work.wait, timedelta(seconds=0.2))
    assert late.kind == "CollectiveTimeout", late
    assert "it goes on" in late.text
    assert not work.is_completed()
    assert not work.is_success()
    assert work.exception() is None
    future = work.get_future()
    rank.tell("looked at the handle")
    [output] = future.then(lambda done: done.value()).wait()
    assert output.data_ptr() == tensor.data_ptr()
    assert (tensor == last).all()
    assert work.wait(timedelta(seconds=20))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.source_rank() == last
    assert work.result()[0].data_ptr() == tensor.data_ptr()


@each_kind
def test_what_a_work_says(site: Site) -> None:
    site.run(handles)


def limits(rank: Rank) -> list[str]:
    """The forms of a limit that a Work of fastcoll's own takes."""
    wrong, out, peer = [], torch.zeros(3), 1 - rank.rank
    work = rank.comm.irecv(out, None, 6)
    if attempt(work.wait, 0.01).kind != "CollectiveTimeout":
        wrong.append("a limit in seconds")
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
    if work.result()[0] is not out or work.get_future().wait()[0] is not out or out[2] != 4:
        wrong.append("another tensor")
    return wrong


def test_limits_of_a_wait(pools: Pools) -> None:
    assert pools(2).run(limits) == [[], []]


def whose_memory(rank: Rank) -> list[bool]:
    """Whether memory lives: in a transfer, its Work dropped; then after it, without another one."""
    group = rank.comm.new_group()
    before, after = ((rank.rank + step) % rank.world_size for step in (-1, 1))
    out = np.empty(50_000, np.float32)
    alive = weakref.ref(out)
    group.irecv(torch.from_numpy(out), before)
    del out
    gc.collect()
    seen = [alive() is not None]
    group.barrier()
    group.isend(torch.ones(50_000), after).wait()
    while alive() is not None:  # until the thread that moved it sees that nothing more comes
        time.sleep(0.01)
    group.barrier()  # else a rank that has its message leaves while the next waits for one
    group.close()
    return [*seen, alive() is not None]


# Over nodes an idle thread may hold what it moved last.
@at([param for param in EACH_KIND if not param.values[0].nodes])
def test_memory_is_kept_as_long_as_it_is_used(site: Site) -> None:
    assert site.run(whose_memory) == [[True, False]] * site.world
