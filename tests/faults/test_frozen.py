# SPDX-License-Identifier: Apache-2.0
"""A job that stands still as a whole, as in a paused container: its limits wait, too."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.harness import Pool, Rank, Setup, attempt

LIMIT_S = 2.0
FROZEN_S = 2 * LIMIT_S
LATE_RANK = 1


def compute(seconds: float) -> None:
    """Use the processor for so long, which a stopped process does not."""
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


def wait_for_one_that_computes(rank: Rank, kind: str) -> str:
    """Wait for rank 1, which computes while the job is frozen; return the error's text, if any."""
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
    stopper = stop_for_a_while(pids) if rank.rank == 0 else 0
    if rank.rank == LATE_RANK:
        compute(0.6)
    start_s = time.monotonic()
    found = attempt(waits[kind])
    took_s = time.monotonic() - start_s
    if stopper:
        os.waitpid(stopper, 0)
        assert took_s > FROZEN_S
    return found.text


def stop_for_a_while(pids: list[int]) -> int:
    """Stop processes soon, and let them go on later, by a child; return its number."""
    child = os.fork()
    if child == 0:
        time.sleep(0.4)  # rank 0 waits by then, on a busy machine, too
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(FROZEN_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        os._exit(0)
    return child


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["", "ab"], ids=["one node", "two nodes"])
@pytest.mark.parametrize(
    "kind", ["call", "asynchronous", "queued", "message", "new group", "symmetric"]
)
def test_nobody_is_blamed(fresh_pool: Callable[..., Pool], kind: str, nodes: str) -> None:
    pool = fresh_pool(2, Setup(nodes=nodes))
    assert pool.run(wait_for_one_that_computes, kind) == ["", ""]
