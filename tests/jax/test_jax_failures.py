# SPDX-License-Identifier: Apache-2.0
"""Errors of calls from JAX: their class or text, their ranks, and the way on."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.jax.start import COMPILE_S, start_jax
from tests.jax.test_jax_verbs import heavy
from tests.support.harness import LATE_S, Attempt, Pool, Rank, attempt

# JAX raises one where it finds the failure itself, and the other where a result is waited for.
OF_PROGRAMS = ("JaxRuntimeError", "ValueError")


def leave_one_out(rank: Rank) -> dict[str, Attempt]:
    """Let rank 1 come late to a call by itself and in a program, then go on in other groups."""
    jax, fj = start_jax(rank)
    comm, x = rank.comm, jax.numpy.ones(3)
    hasty, hastier = rank.hasty_group(0.5), rank.hasty_group(0.5)
    alone = comm.new_group([0])
    found = {}
    program = fj.jit(lambda one: fj.all_reduce(one, group=hastier))
    program(x).block_until_ready()
    if rank.rank == 0:
        later = fj.jit(lambda one: fj.all_reduce(one, group=alone))
        later(x).block_until_ready()
        square = jax.numpy.ones((256, 256))
        late = jax.jit(lambda: x + heavy(square, 60))  # the program fails after it was started
        late().block_until_ready()
        found["by itself"] = attempt(fj.all_reduce, x, group=hasty)
        results = program(late()), later(x)
        found["in a program"] = attempt(results[0].block_until_ready)
        found["in the next program"] = attempt(results[1].block_until_ready)
        found["in a later program"] = attempt(lambda: later(x).block_until_ready())
    comm.barrier()
    new = comm.new_group()
    after = fj.jit(lambda one: fj.all_reduce(one, group=new))
    found["in a new group"] = attempt(lambda: np.testing.assert_array_equal(after(x), 2))
    found["by itself, afterwards"] = attempt(fj.all_reduce, x)
    return found


@pytest.mark.long
def test_a_timeout_has_its_class_or_its_text(fresh_pool: Callable[..., Pool]) -> None:
    found, other = fresh_pool(2).run(leave_one_out, deadline_s=COMPILE_S)
    by_itself = found.pop("by itself")
    assert (by_itself.kind, by_itself.ranks) == ("CollectiveTimeout", (1,))
    for name in ("in a program", "in the next program"):
        one = found.pop(name)
        assert one.kind in OF_PROGRAMS, one
        assert "CollectiveTimeout: all_reduce(SUM, float64, numel=3)" in one.text
        assert "rank 1" in one.text
    assert [one.kind for one in (*found.values(), *other.values())] == [""] * 5, (found, other)


def wait_for_the_dead(rank: Rank) -> Attempt:
    jax, fj = start_jax(rank)
    x = jax.numpy.ones(3)
    program = fj.jit(lambda one: jax.lax.fori_loop(0, 2, lambda _, y: fj.all_reduce(y), one))
    jax.block_until_ready(program(x))
    rank.tell(f"rank {rank.rank} is there")
    if rank.rank == 0:
        signal.pause()
    return attempt(lambda: jax.block_until_ready(program(x)))


def test_a_killed_rank_is_named(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2)
    pool.start(wait_for_the_dead)
    for rank in range(2):
        pool.wait_for(f"rank {rank} is there")
    os.kill(pool.pids[0], signal.SIGKILL)
    [found] = pool.collect(COMPILE_S, ranks=[1])
    assert found.value.kind in OF_PROGRAMS
    assert "UNAVAILABLE: PeerLostError" in found.value.text
    assert "rank 0" in found.value.text
    assert found.value.seconds < LATE_S


def differ(rank: Rank) -> Attempt:
    jax, fj = start_jax(rank)
    return attempt(fj.all_reduce, jax.numpy.ones(3 + rank.rank))


def test_ranks_that_differ_are_told_so(fresh_pool: Callable[..., Pool]) -> None:
    for found in fresh_pool(2).run(differ, deadline_s=COMPILE_S):
        assert found.kind == "DesyncError"


def interrupt_a_program(rank: Rank) -> float:
    """Return after how many seconds a waiting program ended in KeyboardInterrupt; 0: it did not."""
    jax, fj = start_jax(rank)
    x = jax.numpy.ones(3)
    program = fj.jit(fj.all_reduce)
    program(x).block_until_ready()
    if rank.rank == 0:
        rank.wait_for("rank 1 has ended")
        return 0
    timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start, took_s = time.monotonic(), 0.0
    try:
        attempt(lambda: program(x).block_until_ready())  # it may raise JAX's error first
    except KeyboardInterrupt:
        took_s = time.monotonic() - start
    timer.cancel()
    rank.tell("rank 1 has ended")
    return took_s


def test_ctrl_c_ends_a_program_that_waits(fresh_pool: Callable[..., Pool]) -> None:
    _, took_s = fresh_pool(2).run(interrupt_a_program, deadline_s=COMPILE_S)
    assert 0 < took_s < LATE_S


def give_bad_facts(rank: Rank) -> Any:
    """Call the handler with the facts of another version."""
    jax, _ = start_jax(rank)
    from fastcoll.integrations import jax_calls

    invoke = jax.ffi.ffi_call(jax_calls.TARGET, jax.ShapeDtypeStruct((1,), np.uint8))
    return attempt(lambda: invoke(call=np.zeros(3, np.int64)).block_until_ready())


def test_another_version_is_refused(fresh_pool: Callable[..., Pool]) -> None:
    [found] = fresh_pool(1).run(give_bad_facts, deadline_s=COMPILE_S)
    assert found.kind == "JaxRuntimeError"
    assert "of different versions" in found.text


@pytest.mark.long
def test_another_jax_is_named() -> None:
    program = "from jax._src import effects; del effects.ordered_effects; import fastcoll.jax"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=COMPILE_S
    )
    assert "ImportError: fastcoll.jax was tested with JAX 0.10.2" in done.stderr
