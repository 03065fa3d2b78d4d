# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes, by the route they agree on: on one GPU they take turns, so calls are few."""

import contextlib
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from fastcoll.errors import FastcollError
from tests.contract.test_gpu_parts import gathers, messages, shuffles
from tests.gpu.work import check_processes, exchange_in_process, on_device
from tests.support import harness
from tests.support.draw import VERBS
from tests.support.gpu import as_gpu_rank

FreshPool = Callable[..., harness.Pool]
LIMIT_S = 30.0


@pytest.mark.parametrize("world", [2, 3])
def test_processes_get_the_cpus_bits(fresh_pool: FreshPool, world: int) -> None:
    pool = fresh_pool(world)
    calls = [
        on_device(verb, dtype, numel, seed=numel)
        for verb in VERBS
        for dtype in ("float32", "bfloat16")
        for numel in (10, 40_000)
    ]
    check_processes(pool, calls)
    kinds = [(numel, dtype) for dtype in ("float32", "bfloat16") for numel in (10, 10_000)]
    results = pool.run(exchange_in_process, kinds, shuffles, gathers, messages)
    assert [problems for problems, _ in results] == [[]] * world
    assert len({report for _, report in results}) == 1, "one route for all"


def route(rank: harness.Rank, hidden: str) -> str:
    from fastcoll.gpu import terms

    terms.ROUTES = tuple(name for name in terms.ROUTES if name != hidden)
    tensor = torch.full((3000,), rank.rank + 1.0, device=as_gpu_rank(rank).device)
    rank.comm.all_reduce(tensor)
    assert bool((tensor == sum(range(rank.world_size + 1))).all())
    return rank.comm.gpu_report()


def test_handles_of_the_runtime_work_too(fresh_pool: FreshPool) -> None:
    reports = fresh_pool(2).run(route, "vmm", deadline_s=120)
    assert all(report.startswith("ipc") for report in reports), reports


def come_and_go(rank: harness.Rank) -> list[int]:
    """Free memory of the device after each of several groups."""
    from fastcoll.gpu.regions import reap

    free = []
    for _ in range(3):
        comm = rank.comm.new_group()
        tensor = torch.ones(1000, device=as_gpu_rank(rank).device)
        comm.all_reduce(tensor)
        torch.cuda.synchronize()
        comm.close()
        rank.comm.barrier()
        reap()  # who left first kept what the switch may read until all had left
        free.append(torch.cuda.mem_get_info()[0])
    return free


def test_groups_leave_no_memory_behind(fresh_pool: FreshPool) -> None:
    for free in fresh_pool(2).run(come_and_go, deadline_s=120):
        assert free[-1] >= free[0] - (16 << 20), free


def die(rank: harness.Rank) -> tuple[str, float]:
    me = as_gpu_rank(rank)
    tensor = torch.ones(1000, device=me.device)
    rank.comm.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        rank.comm.all_reduce(tensor)
        while time.monotonic() - start < LIMIT_S:
            rank.comm.check()
            time.sleep(0.01)
    except FastcollError as error:
        torch.cuda.synchronize()  # the kernel that waited was told, too
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", 0.0


def test_a_killed_peer_is_named_before_the_limit(fresh_pool: FreshPool) -> None:
    pool = fresh_pool(2, harness.Setup(timeout_s=LIMIT_S))
    first, second = pool.outcomes(die, deadline_s=90)
    assert second.exit_code == -signal.SIGKILL
    assert first.ok, first.describe()
    text, took_s = first.value
    assert text.startswith("PeerLostError"), text
    assert "rank 1" in text
    assert took_s < LIMIT_S / 4


def go_on(rank: harness.Rank) -> list[float]:
    me = as_gpu_rank(rank)
    tensor = torch.full((1000,), me.rank + 1.0, device=me.device)
    rank.comm.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(FastcollError):  # it may be gone already
        rank.comm.all_reduce(tensor)
    # The kernels that wait for it are told, and are waited for.
    smaller = rank.comm.shrink(timeout_s=10.0)
    tensor.fill_(smaller.rank + 1.0)
    smaller.all_reduce(tensor)
    torch.cuda.synchronize()
    smaller.check()
    result = tensor[:2].tolist()
    smaller.close()
    return result


def test_a_smaller_group_goes_on(fresh_pool: FreshPool) -> None:
    start = time.monotonic()
    outcomes = fresh_pool(3, harness.Setup(timeout_s=LIMIT_S)).outcomes(go_on, deadline_s=70)
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome.describe()
        assert outcome.value == [3.0, 3.0]
    assert time.monotonic() - start < LIMIT_S


def leave_early(rank: harness.Rank) -> float:
    """Rank 1 gives and leaves, while rank 0's stream is not yet where it takes."""
    me, comm = as_gpu_rank(rank), rank.comm
    tensor = torch.full((100,), float(me.rank), device=me.device)
    comm.broadcast(tensor, 0)
    torch.cuda.synchronize()
    comm.barrier()
    if me.rank == 1:
        comm.broadcast(tensor.fill_(5), 1)
        comm.close()
        return float(tensor.mean())
    torch.cuda._sleep(4_000_000_000)  # cycles: two seconds
    comm.broadcast(tensor, 1)
    while not comm.peer_is_gone(1):
        time.sleep(0.001)
    while not torch.cuda.current_stream().query():
        comm.check()
        time.sleep(0.01)
    comm.check()
    return float(tensor.mean())


def test_who_gave_and_left_is_not_lost(fresh_pool: FreshPool) -> None:
    assert fresh_pool(2, harness.Setup(timeout_s=LIMIT_S)).run(leave_early) == [5.0, 5.0]
