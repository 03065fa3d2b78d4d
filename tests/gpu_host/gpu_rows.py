# SPDX-License-Identifier: Apache-2.0
"""Requests of calls on GPUs, and a table with rows for them, as `fastcoll tune` writes it."""

from dataclasses import replace
from functools import partial
from typing import Any

from fastcoll.choose.algorithms.shared import CPU
from fastcoll.measure.tune import make_document
from fastcoll.types import DType, Op, Request, Verb

Json = dict[str, Any]
MACHINE = {
    "names": ["Some GPU"],
    "num_gpus": 2,
    "driver": "580.1",
    "nccl": "2.27.5",
    "layout": "1",
}


def row(algorithm: str, size_bytes: int, time_us: float, **fields: Any) -> Json:
    return {
        "verb": "all_reduce",
        "world_size": 2,
        "ranks_per_gpu": 1,
        "ranks_are": "processes",
        "num_channels": 32,
        "size_bytes": size_bytes,
        "algorithm": algorithm,
        "time_us": time_us,
        "low_us": time_us,
        "high_us": time_us,
    } | fields


# In rank order chain wins, which would never be the model's choice; in any order NCCL does.
TIMES = {"one_shot": 40.0, "two_shot": 30.0, "ring": 15.0, "chain": 20.0, "nccl_moves": 25.0}
ROWS = [row(name, size, us) for name, us in TIMES.items() for size in (4096, 1 << 20)]
ROWS += [row("nccl", size, 10.0) for size in (4096, 1 << 20)]


def part(rows: list[Json], **fields: Any) -> Json:
    return {
        "command": "fastcoll tune --device cuda",
        "date": "2026-01-01T00:00:00+00:00",
        "is_complete": True,
        "machine": MACHINE,
        "left_out": {},
        "rows": rows,
    } | fields


def document(rows: list[Json] = ROWS) -> Json:
    return make_document([], is_complete=False, fallback=CPU) | {"gpu": part(rows)}


def request(**fields: Any) -> Request:
    """A call of 8 ranks on a GPU each."""
    plain = Request(
        Verb.all_reduce, DType.float32, Op.SUM, 1000, 0, 8, "auto", "same_bits", 8, 0, 16, 1
    )
    return replace(plain, **fields)


# One that the rows are for.
row_request = partial(request, numel=1 << 14, world_size=2, num_cpus=2, num_channels=32)
