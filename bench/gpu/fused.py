# SPDX-License-Identifier: Apache-2.0
"""Times the Triton kernels on one GPU, in captured graphs; ranks are streams (streams.py).

all_reduce -> add residual -> RMSNorm as one kernel, beside the same as three steps; and the plain
all_reduce, to be set beside that of CUDA in measured.json. Every case is compared with sums in
float32 before it is timed. One thread launches all graphs, so the time is that of the last rank:
the others have waited for it. `python fused.py OUT.json`.
"""

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import streams
import torch
from measure import save
from streams import Body, Group

from fastcoll import env
from fastcoll_kernels import epilogues, one_shot, two_shot
from fastcoll_kernels.workspace import Workspace

BUDGET_S = 80.0
CALLS, WINDOWS = 50, 9
COLUMNS, EPSILON = 4096, 1e-5
ROWS = (1, 8, 64, 512)  # of bfloat16: 8 KiB to 4 MiB
SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20)  # of float32
WORLDS = (2, 4, 8)
CHANNELS, SCRATCH_BYTES = 16, 64 << 20
MODULES = {"one_shot": one_shot, "two_shot": two_shot}
Row = dict[str, Any]


def time_us(group: Group, call: Body, outs: list[torch.Tensor], wanted: torch.Tensor) -> float:
    """Microseconds of a call, whose results must be close to what is wanted."""
    replays = group.capture(call, CALLS)
    for out in outs:
        out.fill_(float("nan"))
    group.replay(replays)
    for space, out in zip(group.spaces, outs, strict=True):
        if space.broken() is not None:
            raise RuntimeError(f"rank {space.rank}: {space.broken()}")
        torch.testing.assert_close(out.float(), wanted, rtol=2.0**-6, atol=1e-2)
    return median(group.replay(replays)[-1] for _ in range(WINDOWS)) * 1e3 / CALLS


def fused(world: int, rows: int) -> Iterator[Row]:
    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=streams.DEVICE).bfloat16()

    parts = [some(rows, COLUMNS) for _ in range(world)]
    residual, weight = some(rows, COLUMNS), some(COLUMNS)
    outs, others, summed = ([torch.empty_like(residual) for _ in parts] for _ in range(3))
    norm = partial(torch.nn.functional.rms_norm, normalized_shape=(COLUMNS,), eps=EPSILON)

    def in_one(space: Workspace) -> None:
        rank = space.rank
        end = epilogues.add_rms_norm(outs[rank], residual, weight, EPSILON, summed[rank])
        one_shot.all_reduce(parts[rank], space, out=outs[rank], epilogue=end)

    def in_three(space: Workspace) -> None:
        rank = space.rank
        one_shot.all_reduce(parts[rank], space, out=summed[rank])
        torch.add(summed[rank], residual, out=summed[rank])
        others[rank] = norm(summed[rank], weight=weight)

    total = torch.stack(parts).float().sum(0) + residual.float()
    wanted = norm(total, weight=weight.float())
    group = Group(world, num_channels=CHANNELS, scratch_bytes=SCRATCH_BYTES)
    for what, call, results in (
        ("fused add + RMSNorm", in_one, outs),
        ("in three steps", in_three, others),
    ):
        value = time_us(group, call, results, wanted)
        yield _row(what, f"{world} ranks, {rows} x {COLUMNS} bfloat16", value)


def plain(world: int, algorithm: str) -> Iterator[Row]:
    group = Group(world, num_channels=CHANNELS, scratch_bytes=SCRATCH_BYTES)
    for num_bytes in SIZES:
        parts = [torch.randn(num_bytes // 4, device=streams.DEVICE) for _ in range(world)]
        outs = [torch.empty_like(part) for part in parts]

        def call(space: Workspace, parts: Any = parts, outs: Any = outs) -> None:
            MODULES[algorithm].all_reduce(parts[space.rank], space, out=outs[space.rank])

        value = time_us(group, call, outs, torch.stack(parts).sum(0))
        yield _row(f"Triton {algorithm}", f"{world} ranks, {num_bytes} bytes", value)


def _row(what: str, case: str, value: float) -> Row:
    return {"what": what, "case": case, "value": round(value, 3), "unit": "us"}


def main(path: Path) -> None:
    end = time.monotonic() + BUDGET_S
    document: dict[str, Any] = {"columns": COLUMNS, "rows": [], "failed": []}
    parts = [partial(fused, world, rows) for world in WORLDS for rows in ROWS]
    for part in parts + [partial(plain, world, name) for world in WORLDS for name in MODULES]:
        try:
            for row in part():
                document["rows"].append(row)
                save(path, document | {"complete": False})
                if time.monotonic() > end:
                    return
        except (RuntimeError, AssertionError) as error:  # the parts after it are worth having
            print(f"{part.func.__name__}{part.args}: {error}", flush=True)
            document["failed"].append(f"{part.func.__name__}{part.args}: {error}"[:300])
    save(path, document | {"complete": not document["failed"]})
    if document["failed"]:
        raise SystemExit(f"{len(document['failed'])} parts failed")


if __name__ == "__main__":
    env.prepare_gpu_threads()
    main(Path(sys.argv[1]))
