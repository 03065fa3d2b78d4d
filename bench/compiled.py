# SPDX-License-Identifier: Apache-2.0
"""Times compiled programs whose all_reduce, addition and RMSNorm are fused, and the same unfused.

    python bench/compiled.py [FILE.json]

Two ranks, one thread each, with the compiled backend of torch.distributed. A program is eight
half-layers: `residual += all_reduce(x)`, then torch's rms_norm. torch.compile makes it twice, with
`fastcoll.fuse_compiled(False)` and with True. Windows of the two take turns, and those of the
operator all_reduce by itself. The two programs' results are compared first. A figure is the time of
a half-layer, in us. Two minutes. Nothing else should run meanwhile.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median, quantiles
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from records import write
from rows import time_ways
from torch import Tensor
from torch._inductor import config
from torch.nn.functional import rms_norm

import fastcoll
from fastcoll.integrations import c10d_build, graph_names, ops
from fastcoll.integrations.fusing import FUSING
from fastcoll.measure.results import provenance

ROWS, COLUMNS, DTYPES, HALF_LAYERS, EPS = (1, 8, 64), 4096, ("bfloat16", "float32"), 8, 1e-6
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
Program = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def compile_program(is_fused: bool) -> Program:
    """Return the program with code of its own, by which torch keeps what it has compiled."""

    def run(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(HALF_LAYERS):
            residual = residual + ops.all_reduce(x)
            x = rms_norm(residual, (COLUMNS,), weight, EPS)
        return x, residual

    code = run.__code__.replace(co_name=f"run_{is_fused}")
    own = FunctionType(code, run.__globals__, None, None, run.__closure__)
    fastcoll.fuse_compiled(is_fused)
    return torch.compile(own, fullgraph=True, dynamic=False)


def ways_of(rank: int, num_rows: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return the programs, compiled for these tensors, and the operator by itself."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(num_rows, COLUMNS, generator=random).to(dtype)
    arguments = x, torch.ones_like(x), torch.ones(COLUMNS, dtype=dtype)
    results, ways = {}, {}
    for name, is_fused in (("unfused", False), ("fused", True)):
        FUSING.num_fused = 0
        program = compile_program(is_fused)
        results[name] = program(*arguments)
        assert FUSING.num_fused == HALF_LAYERS * is_fused, FUSING.num_fused
        ways[name] = lambda program=program: program(*arguments)
    for one, other in zip(results["unfused"], results["fused"], strict=True):
        difference = (one - other).abs().max()
        assert difference <= 0.05 * one.abs().max(), difference
    default = graph_names.name_of(None)
    total = torch.ops.fastcoll.all_reduce
    ways["all_reduce"] = lambda: [total(x, 0, default) for _ in range(HALF_LAYERS)]
    return ways


def time_on_rank(rank: int, folder: str) -> None:
    """Write the times of rank 0 to a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("fastcoll", store=store, rank=rank, world_size=2)
    assert not c10d_build.reason(), c10d_build.reason()
    points = []
    with config.patch(fx_graph_cache=False):
        for mode, enter in MODES.items():
            for dtype in DTYPES:
                for num_rows in ROWS:
                    with enter():
                        ways = ways_of(rank, num_rows, getattr(torch, dtype))
                        times = time_ways(fastcoll, ways)
                    points.append(point_of(mode, dtype, num_rows, times))
    if rank == 0:
        Path(folder, "points.json").write_text(json.dumps(points))
    dist.destroy_process_group()


def point_of(mode: str, dtype: str, num_rows: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians and the ninth tenth of a half-layer, in us, and the ratio of each turn."""
    each = {name: [us / HALF_LAYERS for us in one] for name, one in times.items()}
    ratios = [one / other for one, other in zip(each["unfused"], each["fused"], strict=True)]
    return {
        "mode": mode,
        "dtype": dtype,
        "shape": [num_rows, COLUMNS],
        "median_us": {name: round(median(one), 3) for name, one in each.items()},
        "p90_us": {name: round(quantiles(one, n=10)[8], 3) for name, one in each.items()},
        "unfused_over_fused": round(median(ratios), 3),
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        mp.spawn(time_on_rank, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
        points = json.loads(Path(folder, "points.json").read_text())
    document = {
        "kind": "compiled",
        **provenance(),
        "settings": {"world_size": 2, "half_layers": HALF_LAYERS},
        "points": points,
    }
    if len(sys.argv) > 1:
        write(document, Path(sys.argv[1]))
    for one in points:
        times = "  ".join(f"{name} {us:8.2f}" for name, us in one["median_us"].items())
        shape, ratio = one["shape"], one["unfused_over_fused"]
        print(f"{one['mode']:9} {one['dtype']:8} {shape!s:10} {times} us  {ratio:6.3f}x")


if __name__ == "__main__":
    main()
