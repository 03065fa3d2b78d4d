# SPDX-License-Identifier: Apache-2.0
"""Ranks that are refused descriptors, memory or files as large as those of a group or its memory.

One is given one more each time until it has enough, so that it fails at every point on the way.
Room in /dev/shm nobody needs.
"""

import ctypes
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.bootstrap import identity
from tests.faults.test_cleanup import BARE, belongings, machine, make_group, use
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt
from tests.support.held import limited, no_threads
from tests.support.programs import run_in_pairs

SOON_S = LATE_S  # far below the limits of the waits: a failure is told, not waited for
LIMIT_S = 20.0


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """All numbers below the limit are taken, but for some."""
    held = [os.open("/dev/null", os.O_RDONLY)]
    while held[-1] < max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) - 1:
        held.append(os.open("/dev/null", os.O_RDONLY))
    try:
        with limited(resource.RLIMIT_NOFILE, held[-1] + 1 + left):
            yield
    finally:
        for fd in held:
            os.close(fd)


def little_memory(left: int) -> AbstractContextManager[None]:
    """Some regions' worth of address space more than what is in use."""
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return limited(resource.RLIMIT_AS, used_bytes + (1 << 20) + left * (18 << 20))


def small_files(left: int) -> AbstractContextManager[None]:
    """No file may be larger than some regions, nor than an arena at first."""
    return limited(resource.RLIMIT_FSIZE, left * (40 << 20))


def make(what: str, rank: Rank, parent: Any, number: int) -> None:
    """Make something and use it; it is gone afterwards."""
    if what == "symmetric":
        try:
            parent.empty(3 << 20)
        finally:
            parent.barrier()  # the group can be used, whatever came of it
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
    [
        (few_descriptors, 11, "RLIMIT_NOFILE is"),
        (little_memory, 5, "RLIMIT_AS is"),
        (small_files, 3, "RLIMIT_FSIZE is"),
    ],
    ids=["descriptors", "memory", "files"],
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
            assert mine.kind in ("", "DriverError"), mine
            assert theirs.kind in ("", "DriverError"), theirs
            assert not mine.kind or "rank 1" in mine.text, mine
            assert max(mine.seconds, theirs.seconds) < SOON_S, (mine, theirs)
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


NOBODY = 65534  # who may not have more descriptors in flight than files open


@contextmanager
def many_in_flight(for_s: float) -> Iterator[None]:
    """This user has as many descriptors in flight as it may, for so long."""
    ends = socket.socketpair()
    with limited(resource.RLIMIT_NOFILE, 200), ends[0], ends[1]:
        os.seteuid(NOBODY)
        try:
            with pytest.raises(OSError, match="Too many references") as refused:
                while True:
                    socket.send_fds(ends[0], [b"."], [ends[0].fileno()] * 50)
            assert refused.value.errno == errno.ETOOMANYREFS
            arrives = threading.Timer(for_s, ends[1].close)
            arrives.start()
            yield
            arrives.join()
        finally:
            os.seteuid(0)


def exchange_when_others_have_room(rank: Rank) -> int:
    old = rank.comm.new_group(timeout_s=LIMIT_S)
    with many_in_flight(0.3) if rank.rank == 1 else nullcontext():
        old.empty(3 << 20)
    with many_in_flight(0.3) if rank.rank == 1 else nullcontext():
        new = old.shrink()
    use(new)
    new.close()
    return int(new.world_size)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, as root may")
def test_descriptors_in_flight_are_waited_for(fresh_pool: Callable[..., Pool]) -> None:
    assert fresh_pool(3).run(exchange_when_others_have_room) == [3, 3, 3]


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
    comm = make_group(rank, "small /dev/shm")
    use(comm)
    comm.empty((1 << 20,))
    comm.shrink().close()
    return type(comm).__name__


def test_a_full_dev_shm_does_not_matter(fresh_pool: Callable[..., Pool]) -> None:
    found = fresh_pool(2, BARE).run(fill_small_shm)
    if found == ["", ""]:
        pytest.skip("this process may not make namespaces")
    assert found == ["Communicator"] * 2


# ---- standard streams ----------------------------------------------------------------------------

CLOSED = """
import os, sys
import torch, torch.distributed as dist
import fastcoll

rank, file, nodes = int(sys.argv[1]), *sys.argv[2:4]
if nodes == "two nodes":
    os.environ["FASTCOLL_NODE_ID"] = f"node {rank}"
store, said = dist.FileStore(file, 2), os.dup(1)
for stream in range(3):
    os.close(stream)
fastcoll.init(store=store, rank=rank, world_size=2)
streams = [os.readlink(f"/proc/self/fd/{stream}") for stream in range(3)]
for _ in range(3):
    for stream in (1, 2):
        os.write(stream, b"a line of a library\\n" * 1000)
    tensor = torch.ones(50_000)
    fastcoll.all_reduce(tensor)
    assert (tensor == 2).all()
os.write(said, str(streams).encode())
fastcoll.destroy()
"""


@pytest.mark.long
def test_closed_streams_get_no_memory_of_the_group(tmp_path: Path) -> None:
    hows = [("one node",), ("two nodes",)]
    for case, rows in run_in_pairs(tmp_path, CLOSED, hows).items():
        for code, out, err in rows:
            assert (code, out) == (0, str(["/dev/null"] * 3)), (case, err)


def transfers_without_threads(rank: Rank) -> list[float]:
    """Messages that are not over at once, strided ones, too: the waits move them."""
    peer, numel = 1 - rank.rank, 1 << 20
    sent, got = torch.full((numel,), rank.rank + 1.0), torch.zeros(numel)
    strided = torch.zeros(6)
    rank.comm.barrier()
    if rank.rank == 2:
        return []
    with no_threads():
        for given, received in ((sent, got), (sent[:3], strided[::2])):
            works = [rank.comm.irecv(received, peer), rank.comm.isend(given, peer)]
            for work in works:
                work.wait()
        ops = [("isend", sent), ("irecv", got)]
        for work in fastcoll.batch_isend_irecv([fastcoll.P2POp(op, one, peer) for op, one in ops]):
            work.wait()
    return [got.sum().item(), strided.sum().item()]


@pytest.mark.parametrize("nodes", ["", "aab"], ids=["one node", "two nodes"])
def test_transfers_need_no_thread(fresh_pool: Callable[..., Pool], nodes: str) -> None:
    found = fresh_pool(len(nodes) or 2, Setup(nodes=nodes)).run(transfers_without_threads)
    assert found[:2] == [[2.0 * (1 << 20), 6.0], [1.0 * (1 << 20), 3.0]]


def end_without_memory(rank: Rank) -> list[Attempt]:
    """The end of a broken group has no memory for its symmetric tensors; then another one is made.

    The first group is the default one.
    """
    kept = fastcoll.empty(3)
    fastcoll.barrier()
    rank.comm.abort()
    with little_memory(1):
        attempts = [attempt(fastcoll.destroy)]
    store = dist.PrefixStore("again", rank.store)
    place = {"rank": rank.rank, "world_size": rank.world_size}
    attempts.append(attempt(fastcoll.init, store=store, **place))
    attempts.append(attempt(fastcoll.barrier))
    del kept
    return attempts


def test_a_group_that_ends_without_memory_is_gone(fresh_pool: Callable[..., Pool]) -> None:
    for ended, *later in fresh_pool(2).run(end_without_memory):
        assert ended.kind == "DriverError", ended
        assert "no memory to copy its symmetric tensors" in ended.text
        assert [one.kind for one in later] == ["", ""], later


def shrink_without_memory(rank: Rank) -> list[Attempt]:
    """Rank 0 has memory for the new group, but not for its symmetric tensors of the old one."""
    kept = rank.comm.empty(75 << 20)
    made: list[Any] = []
    with little_memory(6) if rank.rank == 0 else nullcontext():
        attempts = [attempt(lambda: made.append(rank.comm.shrink()))]
    attempts += [attempt(group.barrier) for group in made]
    del kept
    return attempts


def test_a_rank_that_cannot_leave_its_old_group_leaves_the_new_one(
    fresh_pool: Callable[..., Pool],
) -> None:
    [alone], [made, lost] = fresh_pool(2).run(shrink_without_memory)
    assert alone.kind == "DriverError" and "symmetric tensors" in alone.text, alone
    assert made.kind == "", made
    assert lost.kind == "PeerLostError" and lost.ranks == (0,), lost
    assert lost.seconds < LATE_S, lost


def wait_without_threads(rank: Rank) -> Attempt:
    """A wait for another node that is long enough to ask the store, where no thread can be had."""
    rank.comm.barrier()
    if rank.rank == 1:
        time.sleep(0.5)
    with no_threads() if rank.rank == 0 else nullcontext():
        one = attempt(rank.comm.barrier)
    rank.comm.barrier()
    return one


def test_a_wait_between_nodes_needs_no_thread(fresh_pool: Callable[..., Pool]) -> None:
    found = fresh_pool(2, Setup(nodes="ab")).run(wait_without_threads)
    assert [one.kind for one in found] == ["", ""], found
