# SPDX-License-Identifier: Apache-2.0
"""Microbenchmarks on one GPU: the cost of the parts of a collective.

They time copies by size, and a signal and an LL pack from rank to rank. They time copies of one
rank into a peer's region and out of it. They time reductions by type and number of ranks, and the
share of the bandwidth by segment size and number of thread blocks. Ranks are threads, as in
measure.py, whose clock this uses. `python kernels.py OUT.json [first]`; ends, not `complete`, when
its time is up. `first`: the copies, the signal and the pack alone.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import LARGE_BYTES, TRAFFIC, WINDOWS, copy_gbps, slowest, time_calls, windows_of
from parts import run_parts
from shapes import LIMIT_S, AllReduce, copying, there_and_back

from fastcoll import env
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks, capture_alone
from fastcoll.types import TORCH_DTYPES, DType

Row = dict[str, Any]

BUDGET_S, FIRST_BUDGET_S = 130.0, 50.0
COPY_SIZES = [1 << 20, 16 << 20, 256 << 20, 1 << 30]
MESSAGE_BYTES = 16 << 20
CHANNELS = (2, 4, 8, 16, 32, 64)
ROUNDS = 10_000
COPIES = 20
MOVE_SIZES = [64 << 10, 1 << 20, 16 << 20, 64 << 20]
# By ranks: the tiles that fit with 32 channels, almost up to the largest.
TILES = {2: [1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 20 << 10]}
TILES[8] = [1 << 10, 2 << 10, 4 << 10, 5 << 10]
DTYPES = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
DTYPES += ("int64", "complex64")


def reduce_us(me: GpuRank, name: str) -> float:
    """Return the microseconds of an all_reduce by two_shot on this rank."""
    dtype = TORCH_DTYPES[DType[name]]
    tensor = torch.zeros(MESSAGE_BYTES // dtype.itemsize, dtype=dtype, device=me.device)
    calls, times = 5, []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        me.synchronize()
        me.comm.barrier()
        start.record(me.stream)
        for _ in range(calls):
            me.comm.all_reduce(tensor, algorithm="two_shot")
        end.record(me.stream)
        me.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    me.comm.check()
    return median(times[1:])


@contextmanager
def group(world: int, channels: int) -> Iterator[GpuRanks]:
    os.environ["FASTCOLL_GPU_CHANNELS"] = str(channels)
    ranks = GpuRanks(["cuda:0"] * world, timeout_s=LIMIT_S)
    try:
        yield ranks
    finally:
        ranks.close()


def copies() -> Iterator[Row]:
    for size in COPY_SIZES:
        yield _row("copy", f"{size} bytes", copy_gbps("cuda:0", size), "GB/s read + written")
    torch.cuda.empty_cache()


def reductions(world: int) -> Iterator[Row]:
    with group(world, 64) as ranks:
        for name in DTYPES:
            time_us = max(ranks.run(reduce_us, name))
            yield _row("reduce", f"{name}, {world} ranks", moved_gbps(world, time_us), "GB/s")


def call_us(ranks: GpuRanks, *args: object) -> float:
    """Return the microseconds of a call, as measure.py times it."""
    return median(slowest([windows for (windows,) in ranks.run(time_calls, *args)]))


def blocks(channels: int) -> Iterator[Row]:
    with group(2, channels) as ranks:
        time_us = call_us(ranks, "all_reduce", "two_shot", MESSAGE_BYTES, True)
        yield _row("blocks", f"{channels} of each of 2 ranks", moved_gbps(2, time_us), "GB/s")
        time_us = call_us(ranks, "send_recv", "auto", 8, False)
        yield _row("send and receive, 8 bytes", f"{channels} channels, eager", time_us, "us")


def moved_gbps(world: int, time_us: float) -> float:
    """Return the bandwidth of reads and writes of a two_shot all_reduce of the message."""
    return TRAFFIC["two_shot"](world) * world * MESSAGE_BYTES / time_us / 1e3


def one_way(step: str) -> Iterator[Row]:
    token = secrets.randbits(62)
    with group(2, 1) as ranks:
        for _ in range(2):  # the first one warms up
            token += ROUNDS + 1
            one_way_ns = ranks.run(there_and_back, step, ROUNDS, token)[0]
    case = f"rank 0 to 1, half a round trip of {ROUNDS} in one kernel of a thread each"
    yield _row(f"{step}, one way", case, one_way_ns / 1e3, "us")


def copy_us(me: GpuRank, step: str, num_bytes: int, num_blocks: int) -> float:
    """Return the microseconds of rank 0's copy into rank 1's region or out; 0 on the others."""
    symmetric = me.comm.empty(num_bytes, dtype=torch.uint8, device=me.device)
    local = torch.empty_like(symmetric)
    source, target, reader = (local, symmetric, 1) if step == "put" else (symmetric, local, 0)
    pattern = (torch.arange(num_bytes, device=me.device) % 251).to(torch.uint8)
    source.copy_(pattern)
    target.zero_()
    times = [0.0]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    body = copying(me, step, local, symmetric, num_blocks)
    me.synchronize()
    me.comm.barrier()
    if me.rank == 0:
        replay = capture_alone(me, lambda: [body() for _ in range(COPIES)]).replay
        for _ in range(WINDOWS + 1):
            start.record(me.stream)
            replay()
            end.record(me.stream)
            me.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / COPIES)
    me.comm.barrier()
    if me.rank == reader and not torch.equal(target, pattern):
        raise RuntimeError(f"wrong bytes: {step}, {num_bytes}")
    return median(times[2:] or times)


def moves(step: str) -> Iterator[Row]:
    """Yield the speed of rank 0's copies while rank 1 does nothing."""
    with group(2, 64) as ranks:
        num_blocks = ranks.run(channels_of)[0]
        for size in MOVE_SIZES:
            time_us = ranks.run(copy_us, step, size, num_blocks)[0]
            case = f"{size} bytes, {num_blocks} blocks, 1 of 2 ranks"
            yield _row(step, case, size / time_us / 1e3, "GB/s one way")


def channels_of(me: GpuRank) -> int:
    assert me.comm.device_group is not None
    return me.comm.device_group.terms.num_channels


def tile_us(me: GpuRank, tile_bytes: int) -> list[float]:
    """Return the microseconds of an all_reduce by two_shot with tiles of this size."""
    source = torch.full((MESSAGE_BYTES // 4,), float(me.rank), device=me.device)
    out = torch.empty_like(source)
    call = AllReduce(me, source, out, "two_shot")
    num_blocks, threads, _ = call.shape
    body = call.launched((num_blocks, threads, tile_bytes))
    me.synchronize()
    me.comm.barrier()
    body()
    me.synchronize()
    me.comm.check()
    told = me.comm.gather_words([int(bool((out != sum(range(me.world_size))).any()))])
    if bad := [rank for rank, (wrong,) in enumerate(told) if wrong]:
        raise RuntimeError(f"wrong result: tiles of {tile_bytes} bytes, ranks {bad}")
    return windows_of(me, [body], 4, graph=True)[0]


def segments(world: int) -> Iterator[Row]:
    """Yield times by the bytes that one block has of one rank's part of a segment."""
    with group(world, 64) as ranks:
        num_blocks = ranks.run(channels_of)[0]
        for tile_bytes in TILES[world]:
            time_us = median(slowest(ranks.run(tile_us, tile_bytes)))
            segment = num_blocks * world * tile_bytes
            case = f"{segment} bytes: {num_blocks} blocks, {world} ranks, tiles of {tile_bytes}"
            yield _row("segment", case, moved_gbps(world, time_us), "GB/s")


def _row(what: str, case: str, value: float, unit: str) -> Row:
    return {"what": what, "case": case, "value": round(value, 3), "unit": unit}


def main(path: Path, is_first: bool = False) -> None:
    assert MESSAGE_BYTES >= LARGE_BYTES
    document: dict[str, Any] = {"message_bytes": MESSAGE_BYTES, "is_first": is_first}
    document |= {"rows": [], "failed": []}
    parts = [copies, *(partial(one_way, step) for step in ("signal", "ll_pack"))]
    parts += [partial(moves, step) for step in ("put", "get")]
    if not is_first:
        parts += [partial(reductions, world) for world in (2, 4, 8)]
        parts += [partial(segments, world) for world in TILES]
        parts += [partial(blocks, channels) for channels in CHANNELS]
    run_parts(path, document, parts, FIRST_BUDGET_S if is_first else BUDGET_S)


if __name__ == "__main__":
    env.prepare_gpu_threads()
    main(Path(sys.argv[1]), "first" in sys.argv[2:])
