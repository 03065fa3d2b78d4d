# SPDX-License-Identifier: Apache-2.0
"""Ranks that are refused descriptors or memory while a group, or symmetric memory, is made.

One is given one more each time until it has enough, so that it fails at every point on the way.
Room in /dev/shm nobody needs.
"""

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_cleanup import BARE, belongings, come_up, machine, use

from fastcoll.bootstrap import identity
from harness import LATE_S, Attempt, Pool, Rank, attempt

SOON_S = LATE_S  # far below the limits of the waits: a failure is told, not waited for
LIMIT_S = 20.0


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """All numbers below the limit are taken, but for some."""
    held = [os.open("/dev/null", os.O_RDONLY)]
    while held[-1] < max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) - 1:
        held.append(os.open("/dev/null", os.O_RDONLY))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1 + left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in held:
            os.close(fd)


@contextmanager
def little_memory(left: int) -> Iterator[None]:
    """Some regions' worth of address space more than what is in use."""
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most_bytes = used_bytes + (1 << 20) + left * (6 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def make(what: str, rank: Rank, parent: Any, number: int) -> None:
    """Make something and use it; it is gone afterwards."""
    if what == "symmetric":
        parent.empty(3 << 20)
        parent.barrier()
        return
    if what == "new_group":
        group = parent.new_group(timeout_s=LIMIT_S)
    else:
        store = dist.PrefixStore(f"{what} {number}", rank.store)
        group = type(parent).from_store(store, rank.rank, rank.world_size, timeout_s=LIMIT_S)
    try:
        group.barrier()
    finally:
        group.close()


def be_refused(
    rank: Rank, what: str, scarce: Callable[[int], Any], most: int
) -> tuple[list[Attempt], dict[str, Any]]:
    """Attempts with 0, 1, ... left on rank 1; what is held before and after, where that differs."""
    use(rank.comm)
    before = belongings()
    attempts = []
    for left in range(most):
        parent = rank.comm.new_group(timeout_s=LIMIT_S)
        if rank.rank == 1:
            with scarce(left):
                attempts.append(attempt(make, what, rank, parent, left))
        else:
            attempts.append(attempt(make, what, rank, parent, left))
        rank.comm.barrier()
        parent.close()
        del parent  # its own arena is there as long as it is
    use(rank.comm)  # nothing of it is in the way of what comes next
    after = belongings()
    # Worker threads stay while there are groups; how many there are is the pool's choice.
    held = ("descriptors", "mappings of memfd", "children")
    return attempts, {
        what: (before[what], after[what]) for what in held if before[what] != after[what]
    }


@pytest.mark.parametrize(
    "what",
    ["init", *(pytest.param(what, marks=pytest.mark.slow) for what in ("new_group", "symmetric"))],
)
@pytest.mark.parametrize(
    ("scarce", "most", "hint"),
    [(few_descriptors, 11, "ulimit -n"), (little_memory, 5, "mapping")],
    ids=["descriptors", "memory"],
)
def test_who_is_refused_says_so_to_all(
    fresh_pool: Callable[..., Pool], what: str, scarce: Any, most: int, hint: str
) -> None:
    before = machine()
    rows = fresh_pool(3).run(be_refused, what, scarce, most)
    refused = [row[1] for row in zip(*(attempts for attempts, _ in rows), strict=True)]
    assert refused[0].kind == "DriverError", refused
    if (what, scarce) != ("symmetric", little_memory):  # an arena takes more than is ever left
        assert refused[-1].kind == "", refused[-1]
    for here, there in ((0, 1), (2, 1)):
        for mine, theirs in zip(rows[here][0], rows[there][0], strict=True):
            assert bool(mine.kind) == bool(theirs.kind), (mine, theirs)
            assert mine.kind in ("", "DriverError", "PeerLostError"), mine
            assert theirs.kind in ("", "DriverError", "PeerLostError"), theirs
            assert max(mine.seconds, theirs.seconds) < SOON_S, (mine, theirs)
    if (what, scarce) == ("symmetric", little_memory):
        hint = "can't map"  # as is found out beforehand
    assert any(hint in one.text for one in refused), refused
    assert any(hint in one.text for one in rows[0][0]), "the others are told why"
    assert [held for _, held in rows] == [{}] * 3
    assert machine() <= before


def shrink(group: Any) -> None:
    group.shrink().close()


def shrink_with_few(rank: Rank, most: int) -> tuple[list[Attempt], list[Any]]:
    """As be_refused."""
    use(rank.comm)
    before = belongings()["descriptors"]
    attempts = []
    for left in range(most):
        group = rank.comm.new_group(timeout_s=LIMIT_S)
        with few_descriptors(left) if rank.rank == 1 else nullcontext():
            attempts.append(attempt(shrink, group))
        rank.comm.barrier()
    return attempts, [before, belongings()["descriptors"]]


def test_who_is_refused_while_others_shrink_is_left_out(fresh_pool: Callable[..., Pool]) -> None:
    rows = fresh_pool(3).run(shrink_with_few, 10)
    first, refused, third = (attempts for attempts, _ in rows)
    assert refused[0].kind == "DriverError", refused
    assert all(one.kind in ("", "DriverError") for one in refused), refused
    assert any("ulimit -n" in one.text for one in refused), refused
    assert refused[-1].kind == "", refused
    for one in (*first, *third):
        assert one.kind == "", one
        assert one.seconds < SOON_S, one
    assert all(before == after for _, (before, after) in rows)


def test_a_process_without_descriptors_does_not_guess_its_machine() -> None:
    known = identity.machine()
    with few_descriptors(0), pytest.raises(OSError, match="Too many open files"):
        identity.machine()
    with few_descriptors(1):
        assert identity.machine() == known


CLONE_NEWNS = 0x00020000
MS_PRIVATE_BELOW = 1 << 18 | 1 << 14


def fill_small_shm(rank: Rank) -> str:
    """Use a group where /dev/shm is as small as containers have it, and full; "" if not allowed."""
    libc = ctypes.CDLL(None)
    if (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(None, b"/", None, MS_PRIVATE_BELOW, None)
        or libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=64k")
    ):
        return ""
    with pytest.raises(OSError, match="No space left"):
        Path("/dev/shm/filler").write_bytes(bytes(128 << 10))
    comm = come_up(rank, "small /dev/shm")
    use(comm)
    comm.empty((1 << 20,))
    comm.shrink().close()
    return type(comm).__name__


def test_a_full_dev_shm_does_not_matter(fresh_pool: Callable[..., Pool]) -> None:
    found = fresh_pool(2, BARE).run(fill_small_shm)
    if found == ["", ""]:
        pytest.skip("this process may not make namespaces")
    assert found == ["Communicator"] * 2
