# SPDX-License-Identifier: Apache-2.0
"""Calls through NCCL itself: in place of kernels that reach no peer, and beside them.

With one GPU there is one rank, for which NCCL still carries everything. NCCL takes several ranks on
one GPU since 2.30, and only if NCCL_MULTI_RANK_GPU_ENABLE says so.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastcoll.machine import gpu
from tests.contract.test_gpu_parts import gathers, messages, shuffles
from tests.gpu.work import check_processes, exchange_in_process, on_device
from tests.support import harness
from tests.support.calls import ROOTED
from tests.support.draw import VERBS
from tests.support.gpu import as_gpu_rank

FreshPool = Callable[..., harness.Pool]

pytestmark = pytest.mark.skipif(
    not gpu.nccl_version(), reason="not run: this torch is built without NCCL"
)


def worlds() -> list[int]:
    return sorted({1, min(4, torch.cuda.device_count())})


def hide_peers(rank: harness.Rank) -> None:
    """As if no rank could map another one's memory."""
    from fastcoll.gpu import regions

    regions._try = lambda *_: (None, "hidden from the test")  # type: ignore[assignment]


@pytest.mark.parametrize("world", worlds())
def test_nccl_gives_the_cpus_bits_where_no_peer_is_reached(
    fresh_pool: FreshPool, world: int
) -> None:
    dtypes = ("float32", "bfloat16", "float8_e4m3fn", "int64", "complex64")
    roots = {verb: world - 1 if verb in ROOTED else 0 for verb in VERBS}
    calls = [
        on_device(verb, dtype, numel, seed=numel, in_place=in_place, root=roots[verb])
        for verb in VERBS
        for dtype in dtypes
        for numel in (0, 1, 1001, 70_000)
        for in_place in (False, True)
        if not in_place or verb in ("all_reduce", "reduce_scatter", "all_gather")
    ]
    pool = fresh_pool(world)
    pool.run(hide_peers)
    check_processes(pool, calls)
    steps = (shuffles, gathers, messages)
    kinds = [(numel, dtype) for numel in (0, 1, 1001, 10_000) for dtype in dtypes]
    for problems, report in pool.run(exchange_in_process, kinds, *steps, deadline_s=80):
        assert not problems, "\n".join(problems[:8])
        assert report.startswith("nccl")
        assert "not ipc: hidden from the test" in report


def beside(rank: harness.Rank) -> tuple[str, list[float]]:
    """A captured graph with a kernel's call and NCCL's."""
    me = as_gpu_rank(rank)
    ones = torch.ones(4096, device=me.device)
    outs = [torch.zeros_like(ones) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()

    def both() -> None:
        for out, algorithm in zip(outs, ("auto", "nccl"), strict=True):
            rank.comm.all_reduce(ones, out=out, algorithm=algorithm)

    both()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        both()
    for out in outs:
        out.zero_()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    rank.comm.check()
    return rank.comm.gpu_report(), [float(out.mean()) for out in outs]


@pytest.mark.parametrize("world", worlds())
def test_kernels_and_nccl_work_side_by_side(fresh_pool: FreshPool, world: int) -> None:
    calls = [
        on_device("all_reduce", dtype, 5000, seed=turn, algorithm="nccl" if turn % 2 else "auto")
        for turn in range(6)
        for dtype in ("float32", "int32")
    ]
    pool = fresh_pool(world)
    check_processes(pool, calls)
    for report, means in pool.run(beside, deadline_s=80):
        assert report.endswith("nccl beside it")
        assert means == [world, world]


def shared(rank: harness.Rank) -> Any:
    me = as_gpu_rank(rank)
    rank.comm.all_reduce(torch.ones(10, device=me.device))
    return rank.comm.gpu_report()


def test_ranks_that_share_a_gpu_are_told_why_not(fresh_pool: FreshPool) -> None:
    world = torch.cuda.device_count() + 1
    reports = fresh_pool(world).run(shared, deadline_s=80)
    assert all("not nccl: 2 ranks share a GPU" in report for report in reports), reports
