# SPDX-License-Identifier: Apache-2.0
"""Nothing stays behind: files, descriptors, mappings, threads, children, memory.

Decides what is listed before and after: in the ranks, and on the machine as far as it is ours.
"""

import ctypes
import gc
import operator
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist

import fastcoll
from tests.support.harness import Pool, Rank, Setup
from tests.support.held import describe_more_held, list_held
from tests.support.programs import run_in_pairs
from tests.support.waiting import wait_until

BARE = Setup(init=False)


def belongings() -> dict[str, Any]:
    """The things that this process holds, by kind."""
    descriptors, mappings = list_held()
    return {
        "descriptors": descriptors,
        "mappings of memfd": mappings,
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "children": len(psutil.Process().children()),
    }


def machine() -> set[str]:
    """Shared memory with a name, as this library, Python or torch would give it.

    Sockets and memfd need no look: the kernel ends them with the process that holds them.
    """
    ours = ("fastcoll", "psm_", "torch_")
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(ours)}


def make_group(rank: Rank, key: str, timeout_s: float = 20) -> Any:
    store = dist.PrefixStore(key, rank.store)
    return fastcoll.init(
        store=store, rank=rank.rank, world_size=rank.world_size, timeout_s=timeout_s
    )


def use(comm: Any) -> None:
    """A bit of everything."""
    for numel in (1, 5000, 300_000):
        comm.all_reduce(torch.ones(numel))
    comm.broadcast(torch.ones(5), 0)
    symmetric = fastcoll.zeros(1000, group=comm)
    comm.all_reduce(symmetric)
    group = comm.new_group()
    group.all_reduce(torch.ones(7), async_op=True).wait()
    group.close()


def cycles(rank: Rank, count: int) -> list[dict[str, Any]]:
    """The things that this rank holds after each group."""
    found = []
    for number in range(count):
        comm = make_group(rank, f"cycle {number}")
        use(comm)
        del comm
        fastcoll.destroy()
        end = time.monotonic() + 5  # worker threads take a moment to end
        while belongings()["threads"] > 1 and time.monotonic() < end:
            time.sleep(0.01)
        found.append(belongings())
    return found


def look(rank: Rank) -> dict[str, Any]:
    """Before anything; torch makes some things of its own at first use."""
    torch.ones(10).add_(1)
    return belongings()


def test_destroy_leaves_nothing(fresh_pool: Callable[..., Pool]) -> None:
    before = machine()
    pool = fresh_pool(3, BARE)
    start = pool.run(look)
    for first, later in zip(start, pool.run(cycles, 4), strict=True):
        assert later[0]["mappings of memfd"] == first["mappings of memfd"] == 0
        assert later[0]["children"] == first["children"] == 0
        assert later[0]["threads"] == first["threads"]
        assert later[0]["descriptors"] == first["descriptors"]
        assert later[1:] == later[:1] * 3
    assert machine() <= before


class MallocInfo(ctypes.Structure):
    """C's struct mallinfo2: `hblkhd` is the word 4, `uordblks` the word 7."""

    _fields_ = (("words", ctypes.c_size_t * 10),)


class Taken(NamedTuple):
    """The memory that this process has taken, by who gave it.

    Attributes:
        by_cpp: Bytes of malloc and new.
        by_python: Blocks of Python's own allocator: an object has one or more.
        by_kernel: Bytes in RAM that are shared with nobody: the allocators take many at once.
    """

    by_cpp: int
    by_python: int
    by_kernel: int


def memory_taken() -> Taken:
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallocInfo
    malloc = libc.mallinfo2().words
    status = Path("/proc/self/status").read_text()
    resident = next(row.split()[1] for row in status.splitlines() if row.startswith("RssAnon"))
    return Taken(malloc[4] + malloc[7], sys.getallocatedblocks(), int(resident) << 10)


def very_many_groups(rank: Rank, count: int) -> list[tuple[int, int, Taken]]:
    """Descriptors, mappings and memory after every tenth of them; they do a bit of everything."""
    held = []
    # Code that closes a descriptor twice closes somebody else's: these must stay open.
    pipes = [os.pipe() for _ in range(5)]
    for number in range(count):
        if number % 4 == 0:
            pipes.append(os.pipe())
            for end in pipes.pop(0):
                os.close(end)
        group = rank.comm.new_group()
        group.all_reduce(torch.ones(3))
        if number % 3 == 0:
            group.all_reduce(group.empty((100,)).fill_(1))
        if number % 7 == 0:
            group.all_reduce(torch.ones(5), async_op=True).wait()
        if number % 40 == 0:
            group = group.shrink()
        group.close()
        del group
        if number % (count // 10) == count // 10 - 1:
            now = belongings()
            held.append((len(now["descriptors"]), now["mappings of memfd"], memory_taken()))
    for read_end, write_end in pipes:
        os.write(write_end, b"x")
        assert os.read(read_end, 1) == b"x"
        os.close(read_end)
        os.close(write_end)
    return held


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_groups_leave_nothing(fresh_pool: Callable[..., Pool]) -> None:
    count = 1200
    for held in fresh_pool(2).run(very_many_groups, count, deadline_s=500):
        assert len(held) == 10
        assert len({fds for fds, _, _ in held}) == 1
        assert len({mappings for _, mappings, _ in held}) == 1
        steps = [Taken(*map(operator.sub, after[2], before[2])) for before, after in pairwise(held)]
        each = [median(column) * 10 / count for column in zip(*steps, strict=True)]
        # The first two are exact: 50 bytes or an object of each group are too many.
        assert all(map(operator.lt, each, (50, 0.7, 1000))), steps


def dropped_groups(rank: Rank, count: int) -> list[str]:
    """Groups that nobody closes, only forgets; some with pending calls or symmetric tensors.

    Return what was held more than before the first one, now and then.
    """
    use(rank.comm)
    before, more = list_held(), []
    for number in range(count):
        group = rank.comm.new_group()
        tensor = group.empty((100,)).fill_(1)
        work = group.all_reduce(tensor, async_op=True)
        if number % 2:
            work.wait()
        rank.comm.barrier()
        del group, tensor, work
        rank.comm.barrier()
        if number % 10 == 9:
            more.append(describe_more_held(before))
    return more


def test_forgotten_groups_are_given_back(fresh_pool: Callable[..., Pool]) -> None:
    assert fresh_pool(2).run(dropped_groups, 40) == [[""] * 4] * 2


def staging(rank: Rank) -> list[int]:
    """Bytes in use of memory shared with each rank, after large private calls of every kind."""
    group = rank.comm.new_group()
    tensor = torch.ones(4 << 20)
    for algorithm in ("auto", "one_shot", "two_shot", "chain"):
        group.all_reduce(tensor, algorithm=algorithm)
    group.broadcast(tensor, 0)
    maps = Path("/proc/self/smaps").read_text()
    sizes = re.findall(r"memfd:.*?\nRss: +(\d+) kB", maps, re.DOTALL)
    group.close()
    return [int(size) << 10 for size in sizes]


def test_staging_memory_is_at_most_4_mib_a_rank(fresh_pool: Callable[..., Pool]) -> None:
    for sizes in fresh_pool(3).run(staging):
        assert len(sizes) >= 3
        assert 3 * (1 << 20) <= sum(sizes) <= 2 * 3 * (4 << 20)  # two groups of three ranks


def test_killed_ranks_leave_nothing(fresh_pool: Callable[..., Pool]) -> None:
    """All at once, in the middle of calls: nobody is left to clean up."""
    before = machine()
    shared_before = psutil.virtual_memory().shared
    pool = fresh_pool(3)
    pool.start(reduce_for_ever)
    time.sleep(0.4)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    for outcome in pool.collect():
        assert outcome.exit_code == -signal.SIGKILL
    assert machine() <= before
    # 3 ranks held 3 x 64 MiB of touched symmetric memory. Other tests of the moment may hold some.
    wait_until(lambda: psutil.virtual_memory().shared - shared_before < 96 << 20)


def reduce_for_ever(rank: Rank) -> None:
    tensor = rank.comm.empty((16 << 20,)).fill_(0)
    while True:
        rank.comm.all_reduce(tensor[: 1 << 20])


PROGRAM = """
import sys, time, threading
import torch, torch.distributed as dist, fastcoll
rank, path, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
comm = fastcoll.init(store=dist.FileStore(path, 2), rank=rank, world_size=2, timeout_s=20)
tensor = fastcoll.zeros(100_000)
fastcoll.all_reduce(tensor)
work = fastcoll.all_reduce(tensor, async_op=True)
if way == "pending":
    for _ in range(50):
        fastcoll.all_reduce(torch.ones(100_000), async_op=True)
elif way == "raise":
    work.wait()
    raise SystemExit("on purpose")
elif way == "destroy":
    fastcoll.destroy()
elif way == "subgroup":
    other = fastcoll.new_group()
    other.all_reduce(tensor)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pending", "fall off", "raise", "destroy", "subgroup"])
def test_programs_end_in_silence(tmp_path: Path, way: str) -> None:
    """However a program ends, it ends soon, without a word and without a trace."""
    before = machine()
    options = ("-W", "default::ResourceWarning")
    [said] = run_in_pairs(tmp_path, PROGRAM, [(way,)], options, limit_s=60).values()
    assert said == [(1, "", "on purpose\n") if way == "raise" else (0, "", "")] * 2
    assert machine() <= before
