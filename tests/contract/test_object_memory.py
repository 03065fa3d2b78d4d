# SPDX-License-Identifier: Apache-2.0
"""Memory of collectives of large Python objects: how much they take, and ranks that have none."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.harness import Attempt, Pool, Rank, attempt

LARGE_BYTES = 40 << 20  # more than malloc ever keeps for itself


def memory(name: str) -> int:
    """Bytes of this process, by a line of its status."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) << 10


def peak(rank: Rank, verb: Callable[[], Any]) -> float:
    """By how many times a large object this process grew at most in a call."""
    rank.comm.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is used now
    before = memory("VmRSS")
    verb()
    return (memory("VmHWM") - before) / LARGE_BYTES


def peaks(rank: Rank, weights_only: bool) -> dict[str, float]:
    """The memory that each verb takes for large objects; ranks 0 and 1 send and receive."""
    comm, me, world = rank.comm, rank.rank, rank.world_size
    numbers = np.arange(LARGE_BYTES, dtype=np.uint8)
    mine: Any = torch.from_numpy(numbers) if weights_only else numbers.tobytes()
    safe: dict[str, Any] = {"weights_only": weights_only}
    at_root = me == 0
    found = {}

    def measure(name: str, verb: Callable[..., Any], *args: Any) -> None:
        found[name] = peak(rank, lambda: verb(*args, **safe))

    measure("gather", comm.gather_object, mine, [None] * world if at_root else None, 0)
    measure("all_gather", comm.all_gather_object, [None] * world, mine)
    measure("broadcast", comm.broadcast_object_list, [mine] if at_root else [None], 0)
    given = [mine] * world if at_root else None
    measure("scatter", comm.scatter_object_list, [None], given, 0)
    if me == 0:
        measure("send", comm.send_object_list, [mine], 1)
    elif me == 1:
        measure("recv", comm.recv_object_list, [None], 0)
    else:
        comm.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("weights_only", [False, True])
def test_memory_of_large_objects(fresh_pool: Callable[..., Pool], weights_only: bool) -> None:
    require_little_memory(fresh_pool(3).run(peaks, weights_only), weights_only)


def require_little_memory(rows: list[dict[str, float]], weights_only: bool) -> None:
    """A rank has what it gives packed, or what it gets; besides the objects that it gets."""
    world = len(rows)
    # torch packs a tensor's memory by way of a copy of it.
    given, spare = 1 + weights_only, 0.7
    for rank, found in enumerate(rows):
        assert found["all_gather"] < world + given + spare, (rank, found)
        at_root = rank == 0
        most = {
            "gather": world + given if at_root else given,
            "broadcast": given if at_root else 2,
            "scatter": world + given - 1 if at_root else 2,
            "send": given,
            "recv": 2,
        }
        for verb, copies in most.items():
            assert found.get(verb, 0) < copies + spare, (rank, verb, found)


HUGE_BYTES = 160 << 20  # more than malloc ever keeps reserved


def without_memory(rank: Rank) -> list[Attempt]:
    """Rank 1 has no memory for what rank 0 gives."""
    comm, me = rank.comm, rank.rank
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mine = bytes(HUGE_BYTES if me == 0 else 1)
    rows = torch.zeros(HUGE_BYTES if me == 0 else 3, dtype=torch.uint8)
    splits = [0, len(rows), 0] if me == 0 else [1, 1, 1]
    gathered = [None] * 3
    if me == 1:
        resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + HUGE_BYTES // 2, limits[1]))
    found = [
        attempt(comm.all_gather_object, [None] * 3, mine),
        attempt(comm.gather_object, mine, gathered if me == 1 else None, 1),
        attempt(comm.broadcast_object_list, [mine], 0),
        attempt(comm.scatter_object_list, [None], [mine] * 3 if me == 0 else None, 0),
        attempt(comm.all_to_all_single, None, rows, None, splits),
    ]
    resource.setrlimit(resource.RLIMIT_AS, limits)
    comm.gather_object(mine, gathered if me == 1 else None, 1)
    assert me != 1 or [len(one) for one in gathered if one] == [HUGE_BYTES, 1, 1]
    return found


@pytest.mark.slow
def test_who_has_no_memory_says_so_to_all(fresh_pool: Callable[..., Pool]) -> None:
    for found in fresh_pool(3).run(without_memory):
        assert [one.kind for one in found] == ["DriverError"] * 5, found
        for one in found:
            assert "rank 1: " in one.text
            assert "can still be used" in one.text
