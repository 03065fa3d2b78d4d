# SPDX-License-Identifier: Apache-2.0
"""`then=TritonEpilogue(...)` on GPUs: compiled code behind each algorithm, eagerly and in graphs.

Expected is the plain call of the same group and then the step in torch. Each step here is one
operation in fp32, so torch rounds as the kernel does.
"""

from collections.abc import Callable

import pytest
import torch

import fastcoll
from fastcoll.errors import UsageError
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks, capture
from tests.gpu.work import bits, numbers

pytest.importorskip("triton", reason="not run: Triton is not installed")
Threads = Callable[[int], GpuRanks]
ROWS, COLUMNS = 37, 1000
ALGORITHMS = ("auto", "one_shot", "two_shot", "chain")


def steps(me: GpuRank, dtype: torch.dtype) -> list[bool]:
    """Elements times a number, and rows below their largest, by each algorithm and in graphs."""
    from tests.triton.users_epilogue import below_largest, times

    source = numbers(3 + me.rank, ROWS * COLUMNS).view(ROWS, COLUMNS).to(me.device, dtype)
    plain, out = torch.empty_like(source), torch.empty_like(source)
    me.comm.all_reduce(source, out=plain)
    wide = plain.float()
    kinds = (
        (fastcoll.TritonEpilogue(times, (1.0 + me.rank,)), wide * (1.0 + me.rank)),
        (
            fastcoll.TritonEpilogue(below_largest, (1.0,), by_rows=True),
            wide.amax(1, keepdim=True) - wide,
        ),
    )
    right = []
    for then, want in kinds:
        wanted = bits(want.to(dtype))
        fastcoll.prepare(source, out=out, then=then, group=me.comm)
        for algorithm in ALGORITHMS:
            me.comm.all_reduce(source, out=out, then=then, algorithm=algorithm)
            right.append(torch.equal(bits(out), wanted))
        work = me.comm.all_reduce(source, out=out.zero_(), then=then, async_op=True)
        work.wait()
        right.append(torch.equal(bits(out), wanted))
        me.synchronize()
        me.comm.barrier()
        graph = capture(me, lambda then=then: me.comm.all_reduce(source, out=out, then=then))
        for _ in range(3):
            out.zero_()
            graph.replay()
        right.append(torch.equal(bits(out), wanted))
        me.synchronize()
        me.comm.barrier()
    me.comm.check()
    return right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_the_call_and_then_the_step(threads: Threads, dtype: torch.dtype) -> None:
    assert all(all(row) for row in threads(2).run(steps, dtype))


def unprepared(me: GpuRank) -> str:
    """A capture of a step that no rank has prepared; the group can be used behind it."""
    from tests.triton.users_epilogue import plus_first

    tensor, addend = torch.ones(64, device=me.device), torch.ones(1, device=me.device)
    then = fastcoll.TritonEpilogue(plus_first, (addend,))
    me.comm.all_reduce(tensor)
    me.synchronize()
    me.comm.barrier()
    text = ""
    try:
        capture(me, lambda: me.comm.all_reduce(tensor, then=then))
    except UsageError as error:
        text = str(error)
    me.comm.barrier()
    me.comm.all_reduce(tensor, then=then)
    me.synchronize()
    assert bool((tensor == me.world_size**2 + 1).all())
    return text


def test_a_capture_needs_a_prepared_step(threads: Threads) -> None:
    assert all("fastcoll.prepare" in text for text in threads(2).run(unprepared))
