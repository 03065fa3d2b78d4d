# SPDX-License-Identifier: Apache-2.0
"""Large messages copied out of their owner's memory: right data, whoever may not, what goes wrong.

An owner which does not wait for its readers is caught by `unawaited_readers` of
tests/protocol/native/test_protocol.cpp; one that dies is named in faults/test_fault_points.py.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fastcoll
from tests.contract.test_parts import counted
from tests.support.calls import MOVES, ROOTED, Call, expected
from tests.support.harness import Attempt, Pool, Rank, Setup, attempt
from tests.support.perform import Result, check, compare, perform_all

ALWAYS = Setup(env={"FASTCOLL_SINGLE_COPY": "always"})
NUMEL = 100_003  # float32: more than a segment, and not a whole number of lines

FreshPool = Callable[..., Pool]


def of(giver: int, getter: int, turn: int, numel: int = NUMEL) -> torch.Tensor:
    """The tensor that one rank gives another in a turn."""
    return torch.arange(numel, dtype=torch.float32) + (giver * 64 + getter) * 1000 + turn


def every_verb(turns: int, world: int) -> list[Call]:
    """Calls of each verb that moves data, of whole tensors and of lists of parts."""
    return [
        Call(
            verb, "float32", NUMEL + turn % 2, root=turn % world if verb in ROOTED else 0, seed=turn
        )
        for turn in range(turns)
        for verb in MOVES
    ]


def counted_parts(rank: Rank) -> bool:
    _, is_right = counted(rank.comm, NUMEL // 3, 0, as_list=False, async_op=False)
    return bool(is_right())


@pytest.mark.long
def test_every_verb_in_turns(fresh_pool: FreshPool) -> None:
    """Owners change what they gave as soon as their call returns."""
    for world in (2, 3):
        pool = fresh_pool(world, ALWAYS)
        check(pool, every_verb(6, world))
        assert all(pool.run(counted_parts))


def who_may(rank: Rank) -> tuple[str, str]:
    return rank.comm.single_copy, rank.comm.single_copy_report


def show_memory(is_shown: bool) -> None:
    """Let others of this user read this process, or not; root would not be bound by it."""
    if os.getuid() == 0:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    ctypes.CDLL(None).prctl(4, int(is_shown))  # PR_SET_DUMPABLE


def forbid(rank: Rank) -> tuple[str, str]:
    """Rank 1 keeps its memory to itself."""
    show_memory(rank.rank != 1)
    rank.comm = fastcoll.init(store=rank.store, rank=rank.rank, world_size=2)
    return who_may(rank)


def test_one_that_may_not_read_decides_for_all(fresh_pool: FreshPool) -> None:
    reason = "rank 0 can't read every rank's memory: " + os.strerror(errno.EPERM)
    assert fresh_pool(2, Setup(init=False)).run(forbid) == [("never", reason)] * 2


def forbid_later(rank: Rank, calls: list[Call]) -> tuple[str, list[Result], list[int]]:
    """Rank 1 keeps its memory to itself once the group is there."""
    show_memory(True)
    rank.comm = fastcoll.init(store=rank.store, rank=rank.rank, world_size=2)
    perform_all(rank, calls)
    pids: list[Any] = [None, None]
    rank.comm.all_gather_object(pids, os.getpid())
    show_memory(rank.rank != 1)
    rank.comm.barrier()
    if rank.rank == 0:
        with pytest.raises(PermissionError):
            os.open(f"/proc/{pids[1]}/mem", os.O_RDONLY)
    assert counted_parts(rank)
    return who_may(rank)[0], perform_all(rank, calls), sends_in_turns(rank, 3)


def test_what_a_rank_may_no_longer_read_still_comes(fresh_pool: FreshPool) -> None:
    pool = fresh_pool(2, Setup(init=False, env={"FASTCOLL_SINGLE_COPY": "always"}))
    calls = every_verb(3, 2)
    modes, results, wrong = zip(*pool.run(forbid_later, calls), strict=True)
    assert (modes, wrong) == (("always", "always"), ([], []))
    assert not compare(calls, [expected(call, 2) for call in calls], results)


def test_a_rank_that_does_not_want_to_decides_for_all(fresh_pool: FreshPool) -> None:
    pool = fresh_pool(2, Setup(env={"FASTCOLL_SINGLE_COPY": "never"}))
    assert pool.run(who_may) == [("never", "rank 0 has FASTCOLL_SINGLE_COPY=never")] * 2


def array_at(address: int, num_bytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def with_a_hole(rank: Rank) -> Attempt:
    """The root's tensor loses a page in its middle: seen only by who copies it."""
    num_bytes = 64 * mmap.PAGESIZE
    if rank.rank == 1:
        return attempt(rank.comm.broadcast, torch.zeros(num_bytes, dtype=torch.uint8), 0)
    memory = mmap.mmap(-1, num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle = ctypes.c_void_p(address + num_bytes // 2)
    assert ctypes.CDLL(None).munmap(middle, ctypes.c_size_t(mmap.PAGESIZE)) == 0
    return attempt(rank.comm.broadcast, array_at(address, num_bytes), 0)


def test_a_copy_that_breaks_off_is_everybodys_error(fresh_pool: FreshPool) -> None:
    outcomes = fresh_pool(2, ALWAYS).run(with_a_hole)
    assert {one.kind for one in outcomes} == {"DriverError"}
    assert len({one.text for one in outcomes}) == 1
    assert "Bad address" in outcomes[0].text
    assert "rank 0" in outcomes[0].text
    assert "FASTCOLL_SINGLE_COPY=never" in outcomes[0].text


def in_secret_memory(rank: Rank) -> bool | str:
    """Memory that the kernel does not copy for others, as with pinned memory, is staged."""
    num_bytes = 64 * mmap.PAGESIZE
    fd = ctypes.CDLL(None, use_errno=True).syscall(447, 0)  # memfd_secret
    if fd < 0:
        return os.strerror(ctypes.get_errno())
    os.ftruncate(fd, num_bytes)
    given = np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)
    given[:] = 7 + rank.rank
    got = np.zeros((2, num_bytes), np.uint8)
    rank.comm.all_gather_into_tensor(got, given)
    return bool((got[0] == 7).all() and (got[1] == 8).all())


def test_memory_that_is_not_copied_for_others_is_staged(fresh_pool: FreshPool) -> None:
    right = fresh_pool(2, ALWAYS).run(in_secret_memory)
    if isinstance(right[0], str):
        pytest.skip(f"this kernel gives no memory of that kind: {right[0]}")
    assert right == [True, True]


def sends_in_turns(rank: Rank, turns: int) -> list[int]:
    """A sender changes its tensor as soon as its call returns; both ways, and with another tag."""
    peer, wrong = 1 - rank.rank, []
    for turn in range(turns):
        got = torch.empty(NUMEL)
        if (turn + rank.rank) % 2:
            given = of(rank.rank, peer, turn)
            fastcoll.send(given, peer, rank.comm, tag=turn)
            given.zero_()
        elif fastcoll.recv(got, peer, rank.comm, tag=turn) != peer or not torch.equal(
            got, of(peer, rank.rank, turn)
        ):
            wrong.append(turn)
        # Both at once: neither may wait for the other to be through.
        given = of(rank.rank, peer, turn + 1000)
        work = fastcoll.isend(given, peer, rank.comm)
        fastcoll.recv(got, peer, rank.comm)
        work.wait()
        given.zero_()
        if not torch.equal(got, of(peer, rank.rank, turn + 1000)):
            wrong.append(turn + 1000)
    return wrong


@pytest.mark.parametrize("mode", ["always", "never"])
def test_sends_in_turns(fresh_pool: FreshPool, mode: str) -> None:
    pool = fresh_pool(2, Setup(env={"FASTCOLL_SINGLE_COPY": mode}))
    assert pool.run(sends_in_turns, 10) == [[], []]
