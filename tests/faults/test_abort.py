# SPDX-License-Identifier: Apache-2.0
"""`abort` in a signal handler, and beside other ends of a group.

That it ends every call that waits stands in test_every_fault.py.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

import torch

from tests.support.harness import LATE_S, Attempt, Pool, Pools, Rank, attempt

Heard = tuple[float, float, list[Attempt]]  # when it was aborted (0 elsewhere), when a call ended


def from_a_signal_handler(rank: Rank) -> Heard:
    """Rank 0 waits in its main thread, where the handler runs."""
    group = rank.comm.new_group()
    aborted = [0.0]

    def handle(number: int, frame: object) -> None:
        aborted[0] = time.monotonic()
        group.abort(f"signal {number}")
        rank.tell("aborted")

    if rank.rank == 0:
        signal.signal(signal.SIGUSR2, handle)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    if rank.rank == 2:
        rank.wait_for("aborted")
    attempts = [attempt(group.all_reduce, torch.ones(3))]
    heard = time.monotonic()
    attempts.append(attempt(group.barrier))
    group.close()
    return aborted[0], heard, attempts


def test_from_a_signal_handler(fresh_pool: Callable[..., Pool]) -> None:
    rows = fresh_pool(3).run(from_a_signal_handler)
    aborted = rows[0][0]
    assert aborted > 0
    for rank, (_, heard, attempts) in enumerate(rows):
        if rank != 2:
            assert heard - aborted < LATE_S
        for one in attempts:
            assert (one.kind, one.ranks) == ("AbortedError", (0,)), one
            assert f"signal {int(signal.SIGUSR2)}" in one.text
        assert all(one.seconds < LATE_S for one in attempts[1:])
    assert len({one.text for _, _, attempts in rows for one in attempts}) == 1


def after_an_error(rank: Rank) -> list[Attempt]:
    """The first verdict holds; a closed group can't be aborted; without a reason it says so."""
    broken, group = rank.comm.new_group(timeout_s=15), rank.comm.new_group()
    attempts = [attempt(broken.all_reduce, torch.ones(3 + rank.rank))]
    broken.abort("too late")
    attempts.append(attempt(broken.barrier))
    broken.close()
    attempts.append(attempt(broken.abort))
    if rank.rank == 0:
        group.abort()
    attempts.append(attempt(group.barrier))
    group.close()
    return attempts


def test_beside_other_errors(pools: Pools) -> None:
    for first, second, closed, last in pools(2).run(after_an_error):
        assert first.kind == second.kind == "DesyncError"
        assert first.text == second.text
        assert closed.kind == "UsageError"
        assert last.kind == "AbortedError"
        assert "no reason given" in last.text


def closed_meanwhile(rank: Rank, rounds: int) -> list[str]:
    """Abort and close at once, in two threads: either the one or the other was first."""
    kinds = []
    for _ in range(rounds):
        group = rank.comm.new_group()
        thread = threading.Thread(target=group.close)
        thread.start()
        kinds.append(attempt(group.abort).kind)
        thread.join()
    return kinds


def test_abort_while_the_group_is_closed(pools: Pools) -> None:
    for kinds in pools(2).run(closed_meanwhile, 50):
        assert set(kinds) <= {"", "UsageError"}
