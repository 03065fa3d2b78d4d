# SPDX-License-Identifier: Apache-2.0
"""Microbenchmarks on one GPU: what the parts of a collective cost there.

Copies by size; reductions by type and number of ranks; the share of the bandwidth by number of
thread blocks. Ranks are threads, as in measure.py, whose clock this uses. `python kernels.py
OUT.json`; ends, not `complete`, when its time is up.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import LARGE_BYTES, LIMIT_S, TRAFFIC, copy_gbps, save, time_calls

from fastcoll import env
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks
from fastcoll.types import TORCH_DTYPES, DType

Row = dict[str, Any]

BUDGET_S = 130.0
COPY_SIZES = [1 << 20, 16 << 20, 256 << 20, 1 << 30]
MESSAGE_BYTES = 16 << 20
CHANNELS = (2, 4, 8, 16, 32, 64)
DTYPES = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
DTYPES += ("int64", "complex64")


def reduce_us(me: GpuRank, name: str) -> float:
    """Microseconds of an all_reduce by two_shot on this rank."""
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
    moved = TRAFFIC["two_shot"](world) * world * MESSAGE_BYTES
    with group(world, 64) as ranks:
        for name in DTYPES:
            time_us = max(ranks.run(reduce_us, name))
            yield _row("reduce", f"{name}, {world} ranks", moved / time_us / 1e3, "GB/s")


def blocks(channels: int) -> Iterator[Row]:
    with group(2, channels) as ranks:
        args = ("all_reduce", "two_shot", MESSAGE_BYTES, True)
        time_us = max(map(median, ranks.run(time_calls, *args)))
        moved = TRAFFIC["two_shot"](2) * 2 * MESSAGE_BYTES
        yield _row("blocks", f"{channels} of each of 2 ranks", moved / time_us / 1e3, "GB/s")
        time_us = max(map(median, ranks.run(time_calls, "send_recv", "auto", 8, False)))
        yield _row("send and receive, 8 bytes", f"{channels} channels, eager", time_us, "us")


def _row(what: str, case: str, value: float, unit: str) -> Row:
    return {"what": what, "case": case, "value": round(value, 3), "unit": unit}


def main(path: Path) -> None:
    assert MESSAGE_BYTES >= LARGE_BYTES
    end = time.monotonic() + BUDGET_S
    document: dict[str, Any] = {"message_bytes": MESSAGE_BYTES, "rows": [], "failed": []}
    parts = [copies, *(partial(reductions, world) for world in (2, 4, 8))]
    for part in [*parts, *(partial(blocks, channels) for channels in CHANNELS)]:
        try:
            for row in part():
                document["rows"].append(row)
                save(path, document | {"complete": False})
                if time.monotonic() > end:
                    return
        except RuntimeError as error:  # the parts after it are worth having all the same
            print(error, flush=True)
            document["failed"].append(str(error).splitlines()[-1])
    save(path, document | {"complete": not document["failed"]})
    if document["failed"]:
        raise SystemExit(f"{len(document['failed'])} parts failed")


if __name__ == "__main__":
    env.prepare_gpu_threads()
    main(Path(sys.argv[1]))
