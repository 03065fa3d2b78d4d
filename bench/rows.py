# SPDX-License-Identifier: Apache-2.0
"""Times a reduction with the RMSNorm behind it beside the same three steps of a program.

    python bench/rows.py [FILE.json]

Two ranks, one thread each. The steps are fastcoll.all_reduce, torch.add and torch's rms_norm; the
other way is one call with `then=fastcoll.RMSNorm(...)`. Windows of the two take turns, and the
plain all_reduce has its own. Results are compared first. About half a minute. Nothing else should
run meanwhile.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from records import write
from torch.nn.functional import rms_norm

import fastcoll
from fastcoll.measure.results import provenance

ROWS, COLUMNS, DTYPES = (1, 8, 64), (4096, 8192), ("bfloat16", "float32")
EPS, ROUNDS, WINDOW_US = 1e-6, 80, 1500


def ways_of(
    comm: Any, rank: int, num_rows: int, columns: int, dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    """Return the ways; the ranks' inputs add up to zero, so that the residual stays as it is."""
    random = torch.Generator().manual_seed(1)
    shape = num_rows, columns
    x = torch.randn(shape, generator=random).to(dtype) * (1 - 2 * rank)
    residual = torch.randn(shape, generator=random).to(dtype)
    weight = torch.randn(columns, generator=random).to(dtype)
    total, fused = torch.empty_like(x), torch.empty_like(x)

    def take_steps() -> torch.Tensor:
        comm.all_reduce(x, out=total)
        return rms_norm(torch.add(total, residual), (columns,), weight, EPS)

    def fuse() -> torch.Tensor:
        then = fastcoll.RMSNorm(weight, EPS, residual=residual)
        comm.all_reduce(x, out=fused, then=then)
        return fused

    difference = (take_steps() - fuse()).abs().max()
    assert difference <= 0.02 * fused.abs().max(), difference
    return {
        "steps": take_steps,
        "fused": fuse,
        "all_reduce": lambda: comm.all_reduce(x, out=total),
    }


def time_ways(comm: Any, ways: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return the us of a call in each window, by way."""
    counts = {}
    for name, way in ways.items():
        start = time.perf_counter()
        for _ in range(30):
            way()
        mine = torch.tensor([(time.perf_counter() - start) / 30 * 1e6])
        comm.all_reduce(mine)  # both ranks make as many calls
        counts[name] = max(3, int(2 * WINDOW_US / mine.item()))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS):
        for name in [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]:
            way, count = ways[name], counts[name]
            comm.barrier()
            start = time.perf_counter()
            for _ in range(count):
                way()
            times[name].append((time.perf_counter() - start) / count * 1e6)
    return times


def time_on_rank(rank: int, folder: str) -> None:
    """Write the times of rank 0 to a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    points = []
    with fastcoll.init(store=store, rank=rank, world_size=2) as comm, torch.no_grad():
        for dtype in DTYPES:
            for columns in COLUMNS:
                for num_rows in ROWS:
                    ways = ways_of(comm, rank, num_rows, columns, getattr(torch, dtype))
                    times = time_ways(comm, ways)
                    points.append(point_of(dtype, num_rows, columns, times))
    if rank == 0:
        Path(folder, "points.json").write_text(json.dumps(points))


def point_of(
    dtype: str, num_rows: int, columns: int, times: dict[str, list[float]]
) -> dict[str, Any]:
    """Return medians, the best windows and the ninth tenth, in us, and the ratio of each turn."""
    ratios = [one / other for one, other in zip(times["steps"], times["fused"], strict=True)]
    return {
        "dtype": dtype,
        "shape": [num_rows, columns],
        "median_us": {name: round(median(one), 3) for name, one in times.items()},
        "best_us": {name: round(min(one), 3) for name, one in times.items()},
        "p90_us": {name: round(quantiles(one, n=10)[8], 3) for name, one in times.items()},
        "steps_over_fused": round(median(ratios), 2),
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        mp.spawn(time_on_rank, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
        points = json.loads(Path(folder, "points.json").read_text())
    document = {
        "kind": "rows",
        **provenance(),
        "settings": {"world_size": 2, "rounds": ROUNDS, "window_us": WINDOW_US},
        "points": points,
    }
    if len(sys.argv) > 1:
        write(document, Path(sys.argv[1]))
    for one in points:
        times = "  ".join(f"{name} {us:8.2f}" for name, us in one["median_us"].items())
        print(f"{one['dtype']:8} {one['shape']!s:12} {times} us  {one['steps_over_fused']:5.2f}x")


if __name__ == "__main__":
    main()
