# SPDX-License-Identifier: Apache-2.0
"""Pages for small calls are there when a group is: its first calls take none from the kernel."""

import mmap
import os
import resource
from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from fastcoll.memory.region import create_region
from fastcoll.native import _C
from tests.support.harness import Pool, Rank

PLACE_BYTES = 8 << 10  # a small message's, see Staging in csrc/cpu/group.h
FIRST_CALLS = _C.K_NUM_SLOTS * _C.K_SLOT_BYTES // PLACE_BYTES  # each takes another place


def count_faults(rank: Rank) -> dict[int, int]:
    """Count the page faults of a new group's first calls, by the bytes of the message."""
    found = {}
    for num_bytes in (8, 2048, 4096):
        tensor = torch.zeros(num_bytes // 4)

        def call(group: object, times: int, tensor: torch.Tensor = tensor) -> None:
            for _ in range(times):
                group.all_reduce(tensor)  # type: ignore[attr-defined]

        call(rank.comm, FIRST_CALLS)  # the code and the tensor
        with closing(rank.comm.new_group()) as group:
            call(group, 1)  # the plan
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            call(group, FIRST_CALLS)
            found[num_bytes] = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_first_calls_take_no_pages(fresh_pool: Callable[..., Pool], world_size: int) -> None:
    for found in fresh_pool(world_size).run(count_faults):
        # Without a touch it is one for each rank and call; a peer's pages come 16 at a time.
        assert max(found.values()) < FIRST_CALLS // 16, found


@pytest.mark.parametrize("world_size", [1, 2, 64])
def test_only_pages_of_small_calls_are_touched(world_size: int) -> None:
    """The owner touches them when it makes the region; a rank alone has no use for them."""
    fd = create_region(world_size)
    try:
        num_bytes = os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)
    all_bytes = _C.region_bytes()
    pad_bytes = all_bytes - _C.K_NUM_SLOTS * _C.K_SLOT_BYTES
    touched = [*range(0, pad_bytes, 4096), *range(pad_bytes, all_bytes, PLACE_BYTES)]
    pages = {at // mmap.PAGESIZE for at in touched} if world_size > 1 else set()
    assert num_bytes == len(pages) * mmap.PAGESIZE
