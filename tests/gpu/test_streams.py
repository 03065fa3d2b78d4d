# SPDX-License-Identifier: Apache-2.0
"""Calls in several streams, asynchronous calls, strided and symmetric tensors."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastcoll.errors import DriverError
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks

Threads = Callable[[int], GpuRanks]


def two_streams(me: GpuRank) -> None:
    # Of another pool than the ranks' own: torch hands the same few streams out again and again.
    other = torch.cuda.Stream(me.device, priority=-1)
    tensors = [torch.full((30_000,), float(me.rank + i), device=me.device) for i in range(20)]
    me.synchronize()
    me.comm.barrier()
    for i, tensor in enumerate(tensors):
        with torch.cuda.stream(other if i % 2 else me.stream):
            me.comm.all_reduce(tensor)
    me.synchronize()
    other.synchronize()
    me.comm.check()
    ranks = sum(range(me.world_size))
    for i, tensor in enumerate(tensors):
        assert bool((tensor == ranks + me.world_size * i).all()), i


def short_lived(me: GpuRank) -> None:
    """Each call in a stream that the program destroys at once; the next one may get its address."""
    cudart = torch.cuda.cudart()
    tensor = torch.ones(300_000, device=me.device)
    me.synchronize()
    me.comm.barrier()
    for _ in range(10):
        handle = ctypes.c_void_p()
        assert int(cudart.cudaStreamCreate(ctypes.addressof(handle))) == 0
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value or 0, me.device)):
            me.comm.all_reduce(tensor)
        assert int(cudart.cudaStreamDestroy(handle.value or 0)) == 0
    me.comm.all_reduce(tensor)  # behind them, in the rank's own stream
    me.synchronize()
    me.comm.check()
    assert bool((tensor == me.world_size**11).all())


def asynchronous(me: GpuRank) -> None:
    tensors = [torch.full((1 << 16,), float(i + 1), device=me.device) for i in range(8)]
    kept = [tensor.sum() for tensor in tensors]  # torch has the memory of the sums below from here
    del kept
    me.synchronize()
    me.comm.barrier()
    works = [me.comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    sums = []
    for work, tensor in zip(works, tensors, strict=True):
        assert work.wait()
        sums.append(tensor.sum())  # in the current stream, which waits
    me.synchronize()
    assert [float(total) for total in sums] == [(i + 1) * me.world_size * 65536.0 for i in range(8)]
    assert all(work.is_completed() and work.is_success() for work in works)
    assert works[0].exception() is None
    assert works[0].result()[0] is tensors[0]
    assert works[0].wait(timeout=5)
    [again] = works[1].get_future().wait()
    assert again is tensors[1]


def strided(me: GpuRank) -> None:
    whole = torch.zeros(100, 8, device=me.device)
    column = whole[:, 3]
    column.fill_(me.rank + 1.0)
    me.synchronize()
    me.comm.barrier()
    me.comm.all_reduce(column)
    me.synchronize()
    total = sum(range(1, me.world_size + 1))
    assert bool((column == total).all())
    assert float(whole.sum()) == 100 * total, "the other columns are as they were"


def symmetric(me: GpuRank) -> list[torch.Tensor]:
    """Symmetric and private inputs and outputs in every mix, which ranks choose for themselves."""
    numel, world = 70_001, me.world_size
    shared = [me.comm.empty(numel, device=me.device) for _ in range(2)]
    private = [torch.empty(numel, device=me.device) for _ in range(2)]
    outputs = []
    for turn in range(8):
        source = (shared if (turn + me.rank) % 2 else private)[0]
        target = (shared if (turn // 2 + me.rank) % 2 else private)[1]
        target = source if turn // 4 else target
        source.fill_(float(me.rank + turn))
        me.synchronize()
        me.comm.barrier()
        me.comm.all_reduce(source, algorithm="two_shot" if turn % 2 else "one_shot", out=target)
        me.synchronize()
        me.comm.check()
        wanted = world * turn + sum(range(world))
        assert bool((target == wanted).all()), (turn, target[:4], wanted)
        outputs.append(target)
    return shared


def outlive(me: GpuRank) -> None:
    group = me.comm.new_group()
    tensor = group.empty(1000, device=me.device)
    tensor.fill_(7.0)
    group.all_reduce(tensor)
    me.synchronize()
    me.comm.barrier()
    group.close()
    assert bool((tensor == 7 * me.world_size).all()), "readable after the group is gone"


def too_large(me: GpuRank) -> None:
    with pytest.raises(DriverError, match="FASTCOLL_GPU_HEAP_MIB"):
        me.comm.empty(1 << 40, dtype=torch.uint8, device=me.device)
    assert me.comm.empty(10, device=me.device).numel() == 10


@pytest.mark.parametrize(
    ("program", "world"),
    [
        (two_streams, 4),
        (short_lived, 2),
        (asynchronous, 2),
        (strided, 2),
        (symmetric, 2),
        (symmetric, 4),
        (outlive, 2),
        (too_large, 2),
    ],
)
def test_on_threads(threads: Threads, program: Callable[..., Any], world: int) -> None:
    threads(world).run(program)
