# SPDX-License-Identifier: Apache-2.0
"""`group.stats()`: calls, bytes and seconds of waiting of each verb."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

import fastcoll
from fastcoll.calls.recorder import VerbStats
from tests.support.harness import Attempt, Pool, Rank, Setup, attempt

LATE_S = 0.3


def work(rank: Rank) -> tuple[dict[str, VerbStats], dict[str, VerbStats]]:
    before = rank.comm.stats()
    for _ in range(5):
        rank.comm.all_reduce(torch.ones(100))
    rank.comm.all_reduce(torch.ones(7), async_op=True).wait()
    rank.comm.broadcast(torch.ones(3, dtype=torch.int8), 0)
    if rank.rank == 1:
        time.sleep(LATE_S)
    rank.comm.barrier()
    return before, rank.comm.stats()


def test_calls_bytes_and_waits_are_counted(fresh_pool: Callable[..., Pool]) -> None:
    found = fresh_pool(2).run(work)
    for before, after in found:
        assert before == {}
        assert after.keys() == {"all_reduce", "broadcast", "barrier"}
        assert after["all_reduce"][:2] == (6, 5 * 400 + 28)
        assert after["broadcast"][:2] == (1, 3)
        assert after["barrier"].calls == 1
    first, second = (after["barrier"].waited_s for _, after in found)
    assert first > LATE_S / 2 > second  # rank 1 came late


def count_in_two_groups(rank: Rank) -> tuple[dict[str, VerbStats], str]:
    """Count in a group of its own, and ask it again when it is closed."""
    group = rank.comm.new_group()
    before = rank.comm.stats()  # of the making of the other one
    for _ in range(3):
        group.all_reduce(torch.ones(4))
    group.all_gather_single(torch.empty(6, dtype=torch.int16), torch.ones(2, dtype=torch.int16))
    assert rank.comm.stats() == before
    own = group.stats()
    group.close()
    with pytest.raises(fastcoll.UsageError) as caught:
        group.stats()
    return own, str(caught.value)


@pytest.mark.parametrize("nodes", ["", "aab"])
def test_each_group_counts_its_own(fresh_pool: Callable[..., Pool], nodes: str) -> None:
    found = fresh_pool(3, Setup(nodes=nodes)).run(count_in_two_groups)
    for own, closed in found:
        assert own["all_reduce"][:2] == (3, 3 * 16)
        assert own["all_gather"][:2] == (1, 4)  # a part of two numbers
        assert all((one.waited_s is None) == bool(nodes) for one in own.values())
        assert "destroyed" in closed or "closed" in closed


def ask_beside_a_call(rank: Rank) -> Attempt | None:
    """Rank 0 asks while another thread of it waits in a call, which rank 1 enters afterwards."""
    if rank.rank == 1:
        rank.wait_for("rank 0 has asked")
    waits = threading.Thread(target=rank.comm.barrier)
    waits.start()
    time.sleep(LATE_S)
    one = attempt(rank.comm.stats)
    if rank.rank == 0:
        rank.tell("rank 0 has asked")
    waits.join()
    return one if rank.rank == 0 else None


@pytest.mark.parametrize("nodes", ["", "ab"])
def test_a_call_of_another_thread_is_not_waited_for(
    fresh_pool: Callable[..., Pool], nodes: str
) -> None:
    found = fresh_pool(2, Setup(nodes=nodes)).run(ask_beside_a_call)[0]
    assert found.seconds < LATE_S / 2, found
