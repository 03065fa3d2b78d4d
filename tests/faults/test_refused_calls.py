# SPDX-License-Identifier: Apache-2.0
"""System calls and limits that one rank is refused: it does without, or all hear which it was."""

import contextlib
import errno
import os
import resource
import socket
import unittest.mock
from collections.abc import Callable

import pytest
import torch

from fastcoll.bootstrap.farewell import say_farewell, why_gone
from fastcoll.bootstrap.os_errors import explain
from tests.faults.test_cleanup import BARE, make_group
from tests.support.harness import LATE_S, Attempt, Pool, Rank, attempt
from tests.support.held import limited


def make_and_add(rank: Rank) -> None:
    with make_group(rank, "refused") as comm:
        tensor = torch.ones(5)
        comm.all_reduce(tensor)
        assert tensor.tolist() == [float(comm.world_size)] * 5


def refuse(rank: Rank, what: str) -> Attempt:
    """Rank 1 is refused one thing."""
    with contextlib.ExitStack() as stack:
        if rank.rank == 1 and what.startswith("RLIMIT"):
            stack.enter_context(limited(getattr(resource, what), 3))
        elif rank.rank == 1:
            no = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            stack.enter_context(unittest.mock.patch.object(os, what, side_effect=no))
        return attempt(make_and_add, rank)


def test_a_rank_that_may_not_ask_for_its_cpus_does_without(
    fresh_pool: Callable[..., Pool],
) -> None:
    for one in fresh_pool(2, BARE).run(refuse, "sched_getaffinity"):
        assert one.kind == "", one


def test_all_hear_of_the_limit_that_refused_memory(fresh_pool: Callable[..., Pool]) -> None:
    theirs, mine = fresh_pool(2, BARE).run(refuse, "RLIMIT_FSIZE")
    assert mine.kind == "DriverError", mine
    assert theirs.kind in ("DriverError", "PeerLostError"), theirs
    assert theirs.seconds < LATE_S
    for one in (mine, theirs):
        assert "ftruncate" in one.text, one
        assert "ulimit -f" in one.text, one


def test_a_refusal_names_the_call_and_the_way_out() -> None:
    with pytest.raises(OSError, match="Bad file") as refused:
        os.close(-1)
    assert "in `os.close(-1)`" in explain(refused.value)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        say_farewell([ours.fileno()], 1, refused.value)
        assert "in `os.close(-1)`" in str(why_gone(theirs.fileno(), 1))
    assert "seccomp" in explain(PermissionError(errno.EPERM, "not permitted"))
