# SPDX-License-Identifier: Apache-2.0
"""all_reduce by the copy engines: the CPU's bits, graphs, kernels beside it, a rank that is lost.

Ranks are threads that share a GPU, or have one each where there are several: only then do bytes
cross between devices.
"""

from collections.abc import Callable

import pytest
import torch

from fastcoll.choose.algorithms.copy_engine import LEAST_BYTES
from fastcoll.errors import CollectiveTimeout, UnsupportedError, UsageError
from fastcoll.gpu.copies import WAVE_BYTES
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks, capture
from fastcoll.types import DType
from tests.gpu.work import Case, bits, data, perform

Threads = Callable[[int], GpuRanks]
Fresh = Callable[[int, float], GpuRanks]
LIMIT_S = 2.0
NUMEL = LEAST_BYTES // 4


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_bits_of_the_cpu(threads: Threads, world_size: int) -> None:
    sizes = [NUMEL, NUMEL + 1, (WAVE_BYTES + 4096) // 4 + 3]
    cases = [
        Case("all_reduce", dtype, numel * 4 // size, op, "copy_engine", in_place, seed=numel)
        for numel in sizes
        for dtype, size, op, in_place in (
            (DType.float32, 4, "SUM", False),
            (DType.bfloat16, 2, "AVG", True),
        )
    ]
    assert threads(world_size).run(perform, cases) == [[]] * world_size


def beside_kernels(me: GpuRank) -> list[bool]:
    """Calls by copy engines and by kernels take turns, eagerly and in a graph, in two streams."""
    source = data(NUMEL, torch.float32, 7 + me.rank, False).to(me.device)
    outs = [torch.empty_like(source) for _ in range(4)]
    small = torch.ones(100, device=me.device)
    aside = torch.cuda.Stream(me.device)
    too_early = False
    try:
        capture(me, lambda: me.comm.all_reduce(source, out=outs[0], algorithm="copy_engine"))
    except UsageError:
        too_early = True
    # A capture begins by waiting for the device: first all ranks' are over, then a kernel starts
    # that waits for the others'.
    me.comm.barrier()
    me.comm.all_reduce(source, out=outs[0], algorithm="two_shot")
    me.comm.all_reduce(source, out=outs[1], algorithm="copy_engine")
    aside.wait_stream(me.stream)
    with torch.cuda.stream(aside):
        me.comm.all_reduce(small)
        me.comm.all_reduce(source, out=outs[2], algorithm="copy_engine")
    me.stream.wait_stream(aside)
    me.synchronize()
    graph = capture(me, lambda: me.comm.all_reduce(source, out=outs[3], algorithm="copy_engine"))
    for _ in range(3):
        outs[3].zero_()
        graph.replay()
    me.synchronize()
    me.comm.check()
    right = [torch.equal(bits(outs[0]), bits(one)) for one in outs[1:]]
    return [too_early, bool((small == me.world_size).all()), *right]


def test_graphs_streams_and_kernels_beside_it(fresh_threads: Fresh) -> None:
    assert all(all(row) for row in fresh_threads(2, 30.0).run(beside_kernels))


def miss(me: GpuRank) -> tuple[str, bool]:
    tensor = torch.ones(NUMEL, device=me.device)
    me.synchronize()
    me.comm.barrier()  # all have their memory: to ask for it may mean to wait for kernels
    me.comm.all_reduce(tensor, algorithm="copy_engine")
    me.synchronize()
    me.comm.barrier()
    if me.rank == 1:
        return "", True
    me.comm.all_reduce(tensor, algorithm="copy_engine")
    me.synchronize()
    with pytest.raises(CollectiveTimeout, match="rank 1") as caught:
        me.comm.check()
    return str(caught.value), bool(tensor.isnan().all())


def test_a_rank_that_does_not_come_is_named_and_leaves_nan(fresh_threads: Fresh) -> None:
    for text, all_nan in fresh_threads(2, LIMIT_S).run(miss):
        assert all_nan, text


def small(me: GpuRank) -> None:
    with pytest.raises(UnsupportedError, match="copy_engine is for"):
        me.comm.all_reduce(torch.ones(9, device=me.device), algorithm="copy_engine")


def test_small_messages_are_refused(threads: Threads) -> None:
    threads(2).run(small)
