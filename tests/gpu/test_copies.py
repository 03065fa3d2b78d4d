# SPDX-License-Identifier: Apache-2.0
"""all_reduce by the copy engines: the CPU's bits, graphs, kernels beside it, a rank that is lost.

Ranks are threads that share a GPU, or have one each where there are several: only then do bytes
cross between devices.
"""

from collections.abc import Callable

import pytest
import torch

from fastcoll.choose.algorithms.copy_engine import LEAST_BYTES
from fastcoll.errors import UsageError
from fastcoll.gpu.copies import WAVE_BYTES
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks, capture
from tests.gpu.test_failures import miss
from tests.gpu.work import bits, check, numbers, on_device

Threads = Callable[[int], GpuRanks]
Fresh = Callable[[int, float], GpuRanks]
NUMEL = LEAST_BYTES // 4


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_bits_of_the_cpu(threads: Threads, world_size: int) -> None:
    sizes = [NUMEL, NUMEL + 1, (WAVE_BYTES + 4096) // 4 + 3]
    calls = [
        on_device(
            "all_reduce",
            dtype,
            numel * 4 // size,
            op=op,
            algorithm="copy_engine",
            in_place=in_place,
            seed=numel,
        )
        for numel in sizes
        for dtype, size, op, in_place in (
            ("float32", 4, "SUM", False),
            ("bfloat16", 2, "AVG", True),
        )
    ]
    check(threads(world_size), calls)


def beside_kernels(me: GpuRank) -> list[bool]:
    """Calls by copy engines and by kernels take turns, eagerly and in a graph, in two streams."""
    source = numbers(7 + me.rank, NUMEL).to(me.device)
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


def test_a_rank_that_does_not_come_is_named_and_leaves_nan(fresh_threads: Fresh) -> None:
    [text, ranks, _, all_nan, _], _ = fresh_threads(2, 2.0).run(miss, 1, NUMEL, "copy_engine")
    assert ranks == (1,), text
    assert all_nan
