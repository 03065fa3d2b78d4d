# SPDX-License-Identifier: Apache-2.0
"""A debugger at a rank: one that stops it, and one that only looks on."""

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.harness import Attempt, Pool, Rank, attempt
from tests.support.waiting import wait_until

ATTACH, DETACH, SEIZE, INTERRUPT = 16, 17, 0x4206, 0x4207  # of <linux/ptrace.h>
WALL = 0x40000000  # waitpid: also for a process that is no child
_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


@contextmanager
def debugger(pid: int, how: int) -> Iterator[None]:
    """Attach to a process; it goes on when the block is left."""
    if _ptrace(how, pid, None, None) != 0:
        if ctypes.get_errno() == errno.EPERM:
            pytest.skip("not run: no process may be debugged here (ptrace rules)")
        raise OSError(ctypes.get_errno(), "ptrace")
    if how == ATTACH:
        os.waitpid(pid, WALL)
    try:
        yield
    finally:
        if how == SEIZE:  # only who is stopped can be let go
            _ptrace(INTERRUPT, pid, None, None)
            os.waitpid(pid, WALL)
        assert _ptrace(DETACH, pid, None, None) == 0


def be_late(rank: Rank, here: Path, go: tuple[Path, Path]) -> Attempt:
    """Each rank makes its call when the test lets it."""
    group = rank.hasty_group(1)
    group.barrier()
    if rank.rank == 1:
        here.touch()
    wait_until(go[rank.rank].exists)
    return attempt(group.all_reduce, torch.ones(5))


def test_a_rank_that_a_debugger_stops_is_named(
    fresh_pool: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = fresh_pool(2)
    here, go = tmp_path / "here", (tmp_path / "go 0", tmp_path / "go 1")
    pool.start(be_late, here, go)
    wait_until(here.exists)
    with debugger(pool.pids[1], ATTACH):
        go[0].touch()
        [waited] = pool.collect(ranks=(0,))
        go[1].touch()
    [late] = pool.collect(ranks=(1,))
    assert waited.value.kind == late.value.kind == "CollectiveTimeout"
    assert waited.value.text == late.value.text
    assert f"process {pool.pids[1]} is stopped" in waited.value.text


def move(rank: Rank) -> list[float]:
    """Large enough to be copied out of the others' memory, where that is allowed."""
    mine = torch.full((1 << 20,), float(rank.rank + 1))
    everything = torch.empty(2 << 20)
    rank.comm.all_gather_into_tensor(everything, mine)
    rank.comm.all_reduce(mine)
    return [float(everything[0]), float(everything[-1]), float(mine[7])]


def test_a_debugger_that_looks_on_is_in_nobodys_way(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2)
    with debugger(pool.pids[1], SEIZE):
        assert pool.run(move) == [[1.0, 2.0, 3.0]] * 2
    assert pool.run(move) == [[1.0, 2.0, 3.0]] * 2
