# SPDX-License-Identifier: Apache-2.0
"""Times collectives of ranks that are threads on the GPUs of this machine.

With one GPU all ranks share it, and no link between GPUs takes part. The figures are the protocol's
latency and the share of the device's own copy bandwidth that a collective uses. Every shape
is compared with an exact result before it is timed. Eager calls and captured graphs; the time of
a call is that of the slowest rank. Small ones in graphs take turns with their floor, a kernel in
the same grid. It exchanges one LL pack with every peer in each block, and does nothing else.
`python measure.py OUT.json [first]`: the file is whole after every row. No new row starts after the
time is up, or for a number of ranks with several failed rows. The file lists the rows left out.
`first`: all_reduce by the library's own choice alone, with 8 and 2 ranks, in half the time.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from parts import save
from shapes import LIMIT_S, AllReduce

from fastcoll import env
from fastcoll.calls.batches import P2POp
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks, capture

BUDGET_S, FIRST_BUDGET_S = 170.0, 80.0
MOST_FAILURES = 3  # of rows with one number of ranks
SIZES = [8, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
SIZES += [16 << 20, 64 << 20]
WORLDS, FIRST_WORLDS = (8, 4, 2), (8, 2)
CALLS, WINDOWS = 20, 9
# Ranks start some tens of us apart, which a floor must not be measured with.
SMALL_CALLS = 200
Row = tuple[int, str, str, int, bool]  # ranks, verb, algorithm, bytes of a part, captured
LARGE_BYTES = 4 << 20  # fewer calls from here on
FLOOR_BYTES = 16 << 10  # up to here the floor of an all_reduce in a graph is timed beside it

# Bytes read and written per rank for a message of one byte, as kernels/cuda/<name>.cuh derives:
# private tensors.
TRAFFIC = {"one_shot": lambda n: n + 3, "two_shot": lambda n: 5 - 2 / n}
# Other verbs, at a few sizes of one rank's part.
MOVES = ("all_gather", "reduce_scatter", "all_to_all", "send_recv")
MOVE_SIZES = [8, 16 << 10, 1 << 20, 16 << 20]


def copy_gbps(device: str, num_bytes: int) -> float:
    """Return the GB/s read and written by a copy within the device, the best of several."""
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


Bound = Callable[[], Any]


def bind(me: GpuRank, verb: str, algorithm: str, num_bytes: int) -> tuple[Bound, torch.Tensor, Any]:
    """Return a call, its output, and its expected result, the same for every repetition."""
    numel, world, comm = num_bytes // 4, me.world_size, me.comm
    mine = torch.full((numel,), float(me.rank), device=me.device)
    ranks = torch.arange(world, dtype=torch.float32, device=me.device)
    if verb == "all_reduce":
        total = torch.full_like(mine, sum(range(world)))
        out = torch.empty_like(mine)
        return lambda: comm.all_reduce(mine, out=out, algorithm=algorithm), out, total
    if verb == "send_recv":
        out, left = torch.empty_like(mine), (me.rank - 1) % world
        ops = [P2POp("isend", mine, (me.rank + 1) % world), P2POp("irecv", out, left)]
        return lambda: comm.batch_isend_irecv(ops)[-1].wait(), out, torch.full_like(mine, left)
    if verb == "reduce_scatter":
        whole, out = mine.repeat(world), torch.empty_like(mine)
        total = torch.full_like(mine, sum(range(world)))
        return lambda: comm.reduce_scatter_tensor(out, whole, algorithm=algorithm), out, total
    out = torch.empty(world * numel, device=me.device)
    wanted = ranks.repeat_interleave(numel)
    if verb == "all_gather":
        return lambda: comm.all_gather_into_tensor(out, mine), out, wanted
    whole = mine.repeat(world)
    return lambda: comm.all_to_all_single(out, whole), out, wanted


def time_calls(
    me: GpuRank, verb: str, algorithm: str, num_bytes: int, graph: bool, with_floor: bool = False
) -> list[list[float]]:
    """Return the microseconds of a call on this rank, by window; then of its floor, if asked."""
    calls = SMALL_CALLS if with_floor else CALLS if num_bytes < LARGE_BYTES else 4
    one_call, result, wanted = bind(me, verb, algorithm, num_bytes)
    result.fill_(float("nan"))
    me.synchronize()
    me.comm.barrier()
    one_call()
    me.synchronize()
    me.comm.check()
    # Told to all, so that no rank waits for one that has given up.
    told = me.comm.gather_words([int(not torch.equal(result, wanted))])
    if bad := [rank for rank, (wrong,) in enumerate(told) if wrong]:
        raise RuntimeError(f"wrong result: {verb}, {algorithm}, {num_bytes} bytes, ranks {bad}")
    bodies = [one_call, *([floor_of(me, algorithm, num_bytes)] if with_floor else [])]
    return windows_of(me, bodies, calls, graph)


def floor_of(me: GpuRank, algorithm: str, num_bytes: int) -> Bound:
    """Return the floor of an all_reduce of this size: an LL pack with every peer, in its grid."""
    one, other = (torch.empty(num_bytes // 4, device=me.device) for _ in range(2))
    return AllReduce(me, one, other, algorithm).floor()


def windows_of(me: GpuRank, bodies: Sequence[Bound], calls: int, graph: bool) -> list[list[float]]:
    """Return the microseconds of each body on this rank, by window; bodies take turns."""

    def repeated(body: Bound) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                body()

        return capture(me, run).replay if graph else run

    marks = [
        [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in bodies]
        for _ in range(WINDOWS + 1)
    ]
    runs = [repeated(body) for body in bodies]
    for window in marks:
        for run, (start, end) in zip(runs, window, strict=True):
            me.comm.barrier()
            start.record(me.stream)
            run()
            end.record(me.stream)
            me.synchronize()
    me.comm.check()
    return [
        [start.elapsed_time(end) * 1e3 / calls for start, end in column[1:]]
        for column in zip(*marks, strict=True)
    ]


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the time of each window on the rank that took longest."""
    return [max(times) for times in zip(*per_rank, strict=True)]


def row(ranks: GpuRanks, case: Row, copy: float | None) -> Any:
    """Return one measured row; with `copy`, also the share of one GPU's memory bandwidth."""
    _, verb, algorithm, num_bytes, graph = case
    with_floor = verb == "all_reduce" and graph and num_bytes <= FLOOR_BYTES
    told = ranks.run(time_calls, verb, algorithm, num_bytes, graph, with_floor)
    windows, *floor = (slowest(per_rank) for per_rank in zip(*told, strict=True))
    time_us = median(windows)
    world = ranks.world_size
    result = {
        "verb": verb,
        "dtype": "float32",
        "algorithm": algorithm,
        "mode": "graph" if graph else "eager",
        "ranks": world,
        "size_bytes": num_bytes,
        "time_us": round(time_us, 3),
        "best_us": round(min(windows), 3),
        "algbw_gbps": round(num_bytes / time_us / 1e3, 3),
    }
    if floor:
        floor_us = median(floor[0])
        result["floor_us"] = round(floor_us, 3)
        result["over_floor"] = round(time_us / floor_us, 3)
    if verb == "all_reduce":
        result["busbw_gbps"] = round(num_bytes / time_us / 1e3 * 2 * (world - 1) / world, 3)
    if copy is not None and verb == "all_reduce" and algorithm in TRAFFIC:
        moved = world * TRAFFIC[algorithm](world) * num_bytes
        result["traffic_gbps"] = round(moved / time_us / 1e3, 2)
        result["fraction_of_copy"] = round(moved / time_us / 1e3 / copy, 4)
    return result


def plan(is_first: bool = False) -> list[Row]:
    """Return the rows to measure, the most useful first; 8 ranks before fewer."""
    if is_first:
        return [
            (world, "all_reduce", "auto", size, graph)
            for world in FIRST_WORLDS
            for graph in (True, False)
            for size in SIZES
        ]
    rows = [
        (world, "all_reduce", algorithm, size, graph)
        for world in WORLDS
        for size in SIZES
        for graph in (True, False)
        for algorithm in ("auto", "one_shot", "two_shot")
        if not (algorithm == "one_shot" and size > 4 << 20)
        if not (not graph and algorithm != "auto")
    ]
    rows += [
        (world, verb, "auto", size, verb != "send_recv")
        for world in WORLDS
        for verb in MOVES
        for size in MOVE_SIZES
    ]
    return sorted(rows, key=lambda case: -case[0])


def main(path: Path, is_first: bool = False) -> None:
    begin = time.monotonic()
    budget_s = FIRST_BUDGET_S if is_first else BUDGET_S
    num_gpus = torch.cuda.device_count()
    copy = copy_gbps("cuda:0", 1 << 30)
    torch.cuda.empty_cache()
    document: dict[str, Any] = {
        "copy_gbps": round(copy, 1),
        "placement": "ranks as threads, rank r on GPU r mod num_gpus",
        "num_gpus": num_gpus,
        "is_first": is_first,
        "reports": {},
        "rows": [],
        "left_out": [],
        "failed": [],
    }
    group: GpuRanks | None = None
    failures: dict[int, int] = {}
    for case in plan(is_first):
        world = case[0]
        late = time.monotonic() - begin > budget_s
        if late or failures.get(world, 0) >= MOST_FAILURES:
            document["left_out"].append(case)
            continue
        try:
            if group is None or group.world_size != world or group.failed:
                if group is not None:
                    group.close()
                group = None  # stays so if there can't be a new one
                devices = [f"cuda:{rank % num_gpus}" for rank in range(world)]
                group = GpuRanks(devices, timeout_s=LIMIT_S)
                report = group.run(lambda me: me.comm.gpu_report())[0]
                document["reports"][str(world)] = report
            document["rows"].append(row(group, case, copy if num_gpus == 1 else None))
        except RuntimeError as error:  # the rows after it are worth having all the same
            print(f"{case}: {error}", flush=True)
            document["failed"].append([*case, str(error).splitlines()[-1]])
            failures[world] = failures.get(world, 0) + 1
        save(path, document)
    if group is not None:
        group.close()
    save(path, document)
    if document["failed"]:
        raise SystemExit(f"{len(document['failed'])} rows failed")


if __name__ == "__main__":
    env.prepare_gpu_threads()
    main(Path(sys.argv[1]), "first" in sys.argv[2:])
