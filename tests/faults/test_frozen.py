# SPDX-License-Identifier: Apache-2.0
"""A job that stands still as a whole, as in a paused container: its limits wait, too."""

import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.harness import Pool, Rank, Setup, attempt

LIMIT_S = 3.0
FROZEN_S = 4.0
LATE_RANK = 1
WAITING, FREE = b"w", b"f"  # rank 0 waits, or is about to; the job goes on again


def wait_for_a_late_rank(rank: Rank, kind: str, note: Path) -> str:
    """Wait for rank 1, late until the job was frozen; return the error's text, if any.

    `note` is a file of one byte: the state of the ranks and of the process that freezes them.
    """
    group = rank.comm
    group.set_timeout(LIMIT_S)
    tensor, new = torch.ones(1000), torch.ones(77_777)
    waits: dict[str, Callable[[], Any]] = {
        "call": lambda: group.all_reduce(tensor),
        "asynchronous": lambda: group.all_reduce(tensor, async_op=True).wait(),
        "queued": lambda: group.all_reduce(new, async_op=True).wait(LIMIT_S),
        "message": lambda: (
            group.send(tensor, 0) if rank.rank == LATE_RANK else group.recv(tensor, LATE_RANK)
        ),
        "new group": lambda: group.new_group().close(),
        "symmetric": lambda: group.empty(1000),
    }
    for _ in range(3):  # then C++ makes the next one
        group.all_reduce(tensor)
    pids: list[Any] = [0] * rank.world_size
    group.all_gather_object(pids, os.getpid())
    with note.open("r+b") as file, mmap.mmap(file.fileno(), 1) as state:
        freezer = freeze(pids, state) if rank.rank == 0 else 0
        if rank.rank == LATE_RANK:
            while state[:] != FREE:
                time.sleep(0.001)
            time.sleep(0.3)  # rank 0 looks at its limit first
        start_s = time.monotonic()
        if freezer:
            state[:] = WAITING
        found = attempt(waits[kind])
        took_s = time.monotonic() - start_s
        if freezer:
            os.waitpid(freezer, 0)
            assert took_s > FROZEN_S
    return found.text


def freeze(pids: list[int], state: mmap.mmap) -> int:
    """Stop processes when rank 0 waits, and let them go on later, by a child; return its number."""
    child = os.fork()
    if child == 0:
        while state[:] != WAITING:
            time.sleep(0.001)
        time.sleep(0.2)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(FROZEN_S)
        state[:] = FREE
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        os._exit(0)
    return child


KINDS = ("call", "asynchronous", "queued", "message", "new group", "symmetric")


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["", "ab"], ids=["one node", "two nodes"])
def test_nobody_is_blamed(fresh_pool: Callable[..., Pool], nodes: str, tmp_path: Path) -> None:
    """A job for each kind of wait; each stands still by itself, all at the same time."""
    jobs = {kind: fresh_pool(2, Setup(nodes=nodes)) for kind in KINDS}
    for kind, job in jobs.items():
        note = tmp_path / kind
        note.write_bytes(b"-")
        job.start(wait_for_a_late_rank, kind, note)
    assert {kind: job.finish() for kind, job in jobs.items()} == {kind: ["", ""] for kind in KINDS}
