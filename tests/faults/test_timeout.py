# SPDX-License-Identifier: Apache-2.0
"""Where a limit comes from, and what a stopped rank may not write.

That every call that waits for a late rank ends at its limit stands in test_every_fault.py; what the
error says of late ranks, in protocol/native/test_timeouts.cpp.
"""

import os
import re
import signal
import time
from typing import Any

import pytest
import torch

from tests.support.fallbacks import refusing
from tests.support.harness import LATE_S, Attempt, Pool, Pools, Rank, Setup, attempt

LIMIT_S = 1.0


def assert_in_time(one: Attempt, limit_s: float) -> None:
    assert one.kind == "CollectiveTimeout", one
    # A rank that enters late hears the verdict of one that waited longer. So the wait is the one
    # that the text names.
    waited = re.search(r" waited ([\d.]+) (s|ms) ", one.text)
    assert waited, one.text
    assert 0.9 * limit_s <= float(waited[1]) * {"s": 1, "ms": 1e-3}[waited[2]]
    assert one.seconds < limit_s + LATE_S


def rank_1_keeps_its_descriptor(rank: Rank) -> list[Attempt]:
    """All ranks meet for a symmetric tensor, and rank 1 gives nobody its memory."""
    group = rank.hasty_group(LIMIT_S)
    if rank.rank == 1:
        exchange = group._exchange_fds

        def late(make: Any) -> Any:
            for waiter in (0, 2):
                rank.wait_for(f"rank {waiter} has no descriptor")
            return exchange(make)

        group._exchange_fds = late
    attempts = [attempt(group.empty, (4,)), attempt(group.barrier)]
    rank.tell(f"rank {rank.rank} has no descriptor")
    rank.wait_for("rank 1 has no descriptor")  # it has to hear of the verdict, not of who left
    group.close()
    return attempts


def test_the_verdict_names_who_kept_its_descriptor_not_who_waited(pools: Pools) -> None:
    rows = pools(3).run(rank_1_keeps_its_descriptor)
    for one in (one for row in rows for one in row):
        assert one.kind == "CollectiveTimeout", one
        assert one.ranks == (1,), one
    assert len({row[1].text for row in rows}) == 1


def with_sizes_of_a_late_rank(rank: Rank) -> Attempt:
    """A call that first asks all ranks for sizes; its limit is not the group's."""
    group = rank.comm.new_group()
    if rank.rank == 1:
        rank.wait_for("rank 0 has no sizes")
    one = attempt(group.all_to_all_single, None, torch.ones(2), None, [1, 1], timeout_s=0.4)
    if rank.rank == 0:
        rank.tell("rank 0 has no sizes")
    group.close()
    return one


@pytest.mark.parametrize("nodes", ["aa", "ab"])
def test_a_call_that_asks_for_sizes_has_its_limit(clusters: Pools, nodes: str) -> None:
    assert_in_time(clusters(nodes).run(with_sizes_of_a_late_rank)[0], 0.4)


def limits(rank: Rank) -> list[Attempt]:
    """A limit of the call's own, below and above the group's; C++ makes the first, a known call."""
    group = rank.comm.new_group()
    other = rank.hasty_group(LIMIT_S)
    group.all_reduce(torch.ones(2), timeout_s=19)
    attempts = []
    if rank.rank == 0:
        with refusing("all_reduce"):
            attempts.append(attempt(group.all_reduce, torch.ones(2), timeout_s=0.4))
    rank.comm.barrier()
    if rank.rank == 1:
        time.sleep(1.3 * LIMIT_S)
    attempts.append(attempt(other.all_reduce, torch.ones(2), timeout_s=20))
    rank.comm.barrier()
    group.close()
    other.close()
    return attempts


def test_a_call_has_a_limit_of_its_own(pools: Pools) -> None:
    first, second = pools(2).run(limits)
    assert_in_time(first[0], 0.4)
    assert "FASTCOLL_TIMEOUT_S" in first[0].text
    assert first[1].kind == second[0].kind == ""
    assert first[1].seconds > LIMIT_S


def default_limit(rank: Rank) -> Attempt | None:
    if rank.rank == 1:
        rank.wait_for("rank 0 failed")
        return None
    found = attempt(rank.comm.all_reduce, torch.ones(2))
    rank.tell("rank 0 failed")
    return found


def test_the_environment_has_a_limit(fresh_pool: Any) -> None:
    setup = Setup(timeout_s=None, env={"FASTCOLL_TIMEOUT_S": "2"})
    first, _ = fresh_pool(2, setup).run(default_limit)
    assert_in_time(first, 2)


def a_reader_that_stays_away(rank: Rank) -> Attempt | None:
    """A root waits for nobody in a broadcast, but may not run ahead for ever."""
    group = rank.comm.new_group()
    result = None
    if rank.rank == 0:
        tensor = torch.ones(2)
        for _ in range(1000):
            result = attempt(group.broadcast, tensor, 0, timeout_s=LIMIT_S)
            if result.kind:
                break
        rank.tell("the root failed")
    else:
        rank.wait_for("the root failed")
    group.close()
    return result


def test_a_reader_that_does_not_come(pools: Pools) -> None:
    first, _ = pools(2).run(a_reader_that_stays_away)
    assert_in_time(first, LIMIT_S)
    assert first.ranks == (1,)


def reduce_for_ever(rank: Rank, numel: int) -> tuple[Attempt, list[float], list[float]]:
    """Until an error; what a survivor's fresh memory holds then, and a while later."""
    group = rank.comm.new_group()
    tensor = torch.zeros(numel)
    group.all_reduce(tensor)
    rank.tell(f"{numel}: rank {rank.rank} calls")
    while True:
        one = attempt(group.all_reduce, tensor, timeout_s=LIMIT_S)
        if one.kind:
            break
    rank.tell(f"{numel}: rank {rank.rank} failed")
    tensor.fill_(3)
    memory = torch.full((numel,), 4.0)
    early = [*torch.unique(tensor).tolist(), *torch.unique(memory).tolist()]
    if rank.rank != 1:
        time.sleep(1.0)  # rank 1 goes on meanwhile
    late = [*torch.unique(tensor).tolist(), *torch.unique(memory).tolist()]
    group.close()
    return one, early, late


@pytest.mark.parametrize("numel", [4, 400_000])
def test_a_stopped_rank(pools: Pools, numel: int) -> None:
    """The others time out; when it wakes up it gets their verdict and writes nothing of theirs."""
    pool: Pool = pools(3)
    pool.start(reduce_for_ever, numel)
    for rank in range(3):
        pool.wait_for(f"{numel}: rank {rank} calls")
    time.sleep(0.1)
    os.kill(pool.pids[1], signal.SIGSTOP)
    for waiter in (0, 2):
        pool.wait_for(f"{numel}: rank {waiter} failed")
    os.kill(pool.pids[1], signal.SIGCONT)
    rows = pool.finish()
    for one, early, late in rows:
        assert one.kind == "CollectiveTimeout"
        assert one.ranks == (1,)
        assert early == late == [3.0, 4.0]
    for rank in (0, 2):
        assert rows[rank][0].seconds < LIMIT_S + LATE_S
    assert len({one.text for one, _, _ in rows}) == 1
