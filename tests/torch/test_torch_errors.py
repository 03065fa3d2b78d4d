# SPDX-License-Identifier: Apache-2.0
"""Errors of torch.distributed's functions on both of fastcoll's backends when ranks go wrong.

That all ranks hear of calls that differ stands in contract/test_differences.py, and memory that
was freed in contract/test_changed_memory.py.
"""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import BACKENDS, COMPILE_S, on_backend
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt
from tests.support.waiting import wait_until, waits

Pools = Callable[[int], Pool]


def wrong_everywhere(rank: Rank) -> list[Attempt]:
    """Make wrong calls on all ranks: no message is sent, and the group goes on."""
    del rank
    parts, three = [torch.ones(9) for _ in range(3)], torch.ones(3)
    seen = [
        attempt(dist.all_gather, parts, torch.ones(8)),
        attempt(dist.all_to_all_single, torch.ones(3), three, [1, 1, 1], [1, 1, 2]),
    ]
    dist.all_reduce(three)
    assert three[0] == 3
    return seen


def test_a_call_that_is_wrong_on_all_ranks_leaves_the_group_usable(backend_pools: Pools) -> None:
    for row in backend_pools(3).run(on_backend, "fastcoll", wrong_everywhere):
        assert [one.kind for one in row] == ["UsageError"] * 2


def kinds_of_errors(rank: Rank) -> list[str]:
    """A group's backend tells the kind of its error: before one, and after each."""
    told = []
    for break_group in (lambda _: None, calls_differ, rank_is_late, rank_leaves):
        group: Any = dist.new_group(timeout=timedelta(seconds=3))
        backend = group._get_backend(torch.device("cpu"))
        dist.all_reduce(torch.ones(3), group=group)
        break_group(group)
        told.append(backend.get_error().name)
        dist.barrier()
    del rank
    return told


def calls_differ(group: Any) -> None:
    assert attempt(dist.all_reduce, torch.ones(3 + group.rank()), group=group).kind == "DesyncError"


def rank_is_late(group: Any) -> None:
    if group.rank() == 0:
        assert attempt(dist.barrier, group).kind == "CollectiveTimeout"
    dist.barrier()


def rank_leaves(group: Any) -> None:
    if group.rank() == 1:
        dist.destroy_process_group(group)
    dist.barrier()
    if group.rank() == 0:
        assert attempt(dist.barrier, group).kind == "PeerLostError"


def test_a_group_tells_the_kind_of_its_error(backend_pools: Pools) -> None:
    first, second = backend_pools(2).run(on_backend, "fastcoll", kinds_of_errors)
    assert first == ["SUCCESS", "COMM_ERROR", "TIMEOUT", "REMOTE_ERROR"]
    assert second == ["SUCCESS", "COMM_ERROR", "TIMEOUT", "COMM_ERROR"]  # who left has no group


def die_once_it_waits() -> None:
    wait_until(lambda: waits(os.getpid()))
    os._exit(7)


def die_beside_a_rank_that_computes(rank: Rank) -> list[Attempt]:
    """Rank 0 dies in a call, while rank 1 waits in it for rank 2 and for 30 minutes."""
    dist.barrier()
    if rank.rank == 2:
        rank.wait_for("over")
        return []
    if rank.rank == 0:
        threading.Thread(target=die_once_it_waits, daemon=True).start()
    tensor = torch.ones(100_000)
    seen = [attempt(dist.all_reduce, tensor), attempt(dist.barrier)]
    rank.tell("over")
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dead_rank_beside_one_that_computes(
    fresh_pool: Callable[..., Pool], backend: str
) -> None:
    pool = fresh_pool(3, Setup(init=False, env={"FASTCOLL_TORCH_BACKEND": backend}))
    pool.start(on_backend, "fastcoll", die_beside_a_rank_that_computes)
    [outcome, _] = pool.collect(COMPILE_S, ranks=[1, 2])
    for one in outcome.value:
        assert (one.kind, one.ranks) == ("PeerLostError", (0,)), one
        assert one.seconds < LATE_S
