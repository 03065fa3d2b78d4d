# SPDX-License-Identifier: Apache-2.0
"""Times collectives of ranks that are threads on the GPUs of this machine.

With one GPU all ranks share it, so what is measured is the protocol's latency and how much of the
device's own copy bandwidth a collective makes use of; no link between GPUs takes part. Every shape
is compared with an exact result before it is timed. Eager calls and captured graphs; the time of
a call is that of the slowest rank. `python measure.py OUT.json`; stops starting new rows after
its time is up and says which were left out.
"""

import json
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fastcoll import env
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks

BUDGET_S = 110.0
SIZES = [8, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
SIZES += [16 << 20, 64 << 20]
WORLDS = (2, 4, 8)
CALLS, WINDOWS = 20, 9
LARGE_BYTES = 4 << 20  # fewer calls from here on
_one_at_a_time = threading.Lock()

# Bytes read and written per rank for a message of one byte, as kernels/cuda/<name>.cuh derives:
# private tensors, in place.
TRAFFIC = {"one_shot": lambda n: n + 3, "two_shot": lambda n: 5 - 2 / n}


def copy_gbps(device: str, num_bytes: int) -> float:
    """Bytes read and written per second by a copy within the device, best of several."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = max(best, 2 * num_bytes / (start.elapsed_time(end) * 1e-3) / 1e9)
    return best


def time_calls(me: GpuRank, algorithm: str, num_bytes: int, graph: bool) -> list[float]:
    """Microseconds of a call on this rank, for each window."""
    calls = CALLS if num_bytes < LARGE_BYTES else 4
    tensor = torch.full((num_bytes // 4,), 1.0, device=me.device)
    zeros = torch.zeros_like(tensor)  # sums of zeros stay what they are, however often
    captured = torch.cuda.CUDAGraph()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WINDOWS + 1)]
    me.synchronize()
    me.comm.barrier()
    me.comm.all_reduce(tensor, algorithm=algorithm)
    me.synchronize()
    me.comm.check()
    if not bool((tensor == me.world_size).all()):
        raise RuntimeError(f"wrong result: {algorithm}, {num_bytes} bytes, rank {me.rank}")

    def body() -> None:
        for _ in range(calls):
            me.comm.all_reduce(zeros, algorithm=algorithm)

    if graph:
        mode = "thread_local"
        with (
            _one_at_a_time,
            torch.cuda.graph(captured, stream=me.stream, capture_error_mode=mode),
        ):
            body()
    for start, end in marks:
        me.comm.barrier()
        start.record(me.stream)
        if graph:
            captured.replay()
        else:
            body()
        end.record(me.stream)
        me.synchronize()
    me.comm.check()
    return [start.elapsed_time(end) * 1e3 / calls for start, end in marks[1:]]


def row(ranks: GpuRanks, algorithm: str, num_bytes: int, graph: bool, copy: float | None) -> Any:
    """One measured row; with `copy`, ranks share one GPU's memory and its use is worked out."""
    per_rank = ranks.run(time_calls, algorithm, num_bytes, graph)
    windows = [max(times) for times in zip(*per_rank, strict=True)]
    time_us = median(windows)
    world = ranks.world_size
    result = {
        "verb": "all_reduce",
        "dtype": "float32",
        "algorithm": algorithm,
        "mode": "graph" if graph else "eager",
        "ranks": world,
        "size_bytes": num_bytes,
        "time_us": round(time_us, 3),
        "best_us": round(min(windows), 3),
        "algbw_gbps": round(num_bytes / time_us / 1e3, 3),
        "busbw_gbps": round(num_bytes / time_us / 1e3 * 2 * (world - 1) / world, 3),
    }
    if copy is not None and algorithm in TRAFFIC:
        moved = world * TRAFFIC[algorithm](world) * num_bytes
        result["traffic_gbps"] = round(moved / time_us / 1e3, 2)
        result["fraction_of_copy"] = round(moved / time_us / 1e3 / copy, 4)
    return result


def main(path: Path) -> None:
    begin = time.monotonic()
    num_gpus = torch.cuda.device_count()
    copy = copy_gbps("cuda:0", 1 << 30)
    torch.cuda.empty_cache()
    document: dict[str, Any] = {
        "copy_gbps": round(copy, 1),
        "placement": "ranks as threads, rank r on GPU r mod num_gpus",
        "num_gpus": num_gpus,
        "reports": {},
        "rows": [],
        "left_out": [],
    }
    plan = [
        (world, algorithm, size, graph)
        for world in WORLDS
        for size in SIZES
        for graph in (True, False)
        for algorithm in ("auto", "one_shot", "two_shot")
        if not (algorithm == "one_shot" and size > 4 << 20)
        if not (not graph and algorithm != "auto")
    ]
    groups: dict[int, GpuRanks] = {}
    for world, algorithm, size, graph in plan:
        if time.monotonic() - begin > BUDGET_S:
            document["left_out"].append([world, algorithm, size, "graph" if graph else "eager"])
            continue
        if world not in groups:
            for old in groups.values():
                old.close()
            devices = [f"cuda:{rank % num_gpus}" for rank in range(world)]
            groups = {world: GpuRanks(devices, timeout_s=20.0)}
            report = groups[world].run(lambda me: me.comm.gpu_report())[0]
            document["reports"][str(world)] = report
        shared = copy if num_gpus == 1 else None
        document["rows"].append(row(groups[world], algorithm, size, graph, shared))
        path.write_text(json.dumps(document))
    for old in groups.values():
        old.close()
    path.write_text(json.dumps(document))


if __name__ == "__main__":
    env.prepare_gpu_threads()
    main(Path(sys.argv[1]))
