# SPDX-License-Identifier: Apache-2.0
"""CuPy's arrays in every verb, in a stream of CuPy's own that torch knows nothing of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fastcoll.calls.batches import P2POp
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks

cupy = pytest.importorskip("cupy", reason="not run: CuPy is not installed")

Threads = Callable[[int], GpuRanks]
NUMEL = 30_000


@contextmanager
def own_stream(me: GpuRank) -> Iterator[Any]:
    """CuPy's current stream, which waits for no other one by itself.

    All that calls and checks in it need of the device (memory, CuPy's kernels) is there already.
    """
    with cupy.cuda.Device(me.device.index), cupy.cuda.Stream(non_blocking=True) as stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr, me.device)):
            kept = [torch.empty(NUMEL * me.world_size, device=me.device) for _ in range(4)]
            del kept
        array = cupy.zeros(NUMEL, dtype=cupy.float32)
        array += 1
        array.fill(1)
        yield stream
        stream.synchronize()


def verbs(me: GpuRank) -> list[str]:
    """Every verb on what CuPy's stream has yet to fill, read behind it in the same stream."""
    comm, rank, world = me.comm, me.rank, me.world_size
    ranks = range(world)
    total = float(sum(ranks))
    wrong = []

    def full(value: float, numel: int = NUMEL) -> Any:
        return cupy.full(numel, value, dtype=cupy.float32)

    with own_stream(me) as stream:
        arrays = [full(rank) for _ in range(3)]
        outs = [full(-1) for _ in range(4)]
        wide = [full(-1, NUMEL * world) for _ in range(3)]
        lists = [[full(-1) for _ in ranks] for _ in range(3)]
        parts = [full(10 * rank + to) for to in ranks]
        many = full(rank, NUMEL * world)
        stream.synchronize()
        comm.barrier()  # nobody asks the driver for memory any more

        arrays[0] += 1
        outs[2].fill(rank)
        comm.all_reduce(arrays[0])
        comm.all_reduce(arrays[1], out=outs[0])
        works = [comm.all_reduce(arrays[2], async_op=True)]
        comm.reduce_scatter_tensor(outs[1], many)
        comm.all_gather_into_tensor(wide[0], outs[1])
        comm.all_gather(lists[0], outs[0])
        comm.broadcast(outs[2], world - 1)
        comm.gather(parts[0], lists[1] if rank == 0 else None, 0)
        comm.all_to_all(lists[2], parts)
        comm.all_to_all_single(wide[1], many)
        comm.scatter(outs[3], parts if rank == 0 else None, 0)
        ring = [P2POp("isend", parts[0], (rank + 1) % world)]
        ring.append(P2POp("irecv", wide[2][:NUMEL], (rank - 1) % world))
        works += comm.batch_isend_irecv(ring)
        for work in works:
            work.wait()
        stream.synchronize()
        # The comparisons' kernels are loaded at their first use, which may wait for the device.
        comm.barrier()
        found = {
            "all_reduce": (arrays[0], total + world),
            "out": (outs[0], total),
            "async_op": (arrays[2], total),
            "reduce_scatter": (outs[1], total),
            "all_gather": (wide[0], total),
            "broadcast": (outs[2], world - 1),
            "scatter": (outs[3], rank),
            "recv": (wide[2][:NUMEL], 10 * ((rank - 1) % world)),
        }
        found |= {f"all_gather of a list, {by}": (lists[0][by], total) for by in ranks}
        found |= {f"all_to_all, {by}": (lists[2][by], 10 * by + rank) for by in ranks}
        if rank == 0:
            found |= {f"gather, {by}": (lists[1][by], 10 * by) for by in ranks}
        wrong = [name for name, (array, value) in found.items() if bool((array != value).any())]
        rows = wide[1].reshape(world, NUMEL)
        wrong += [f"all_to_all_single, {by}" for by in ranks if bool((rows[by] != by).any())]
    me.comm.check()
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_every_verb_in_a_stream_of_cupys(threads: Threads, world: int) -> None:
    assert threads(world).run(verbs) == [[]] * world


def types(me: GpuRank) -> list[str]:
    """Types and layouts; a tensor of torch's and an array of CuPy's in one call."""
    wrong = []
    with own_stream(me) as stream:
        arrays = [
            (name, cupy.full((64, 3), me.rank + 1).astype(name))
            for name in ("float16", "float64", "int8", "int64", "uint8", "complex64")
        ]
        column = cupy.full((500, 4), me.rank + 1.0)
        tensor = torch.full((1000,), me.rank + 1.0, device=me.device)
        out = cupy.zeros(1000, dtype=cupy.float32)
        me.synchronize()
        stream.synchronize()
        me.comm.barrier()
        for _, array in arrays:
            me.comm.all_reduce(array)
        me.comm.all_reduce(column[:, 1])
        me.comm.all_reduce(tensor.add_(1), out=out)
        stream.synchronize()
        me.comm.barrier()  # as above
        total = sum(range(1, me.world_size + 1))
        wrong += [name for name, array in arrays if bool((array != total).any())]
        if bool((column[:, 1] != total).any()) or bool((column[:, 2] != me.rank + 1).any()):
            wrong.append("strided")
        if bool((out != total + me.world_size).any()):
            wrong.append("behind torch's stream")
    me.comm.check()
    return wrong


def test_types_layouts_and_both_libraries_in_one_call(threads: Threads) -> None:
    assert threads(2).run(types) == [[]] * 2
