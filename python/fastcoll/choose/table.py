# SPDX-License-Identifier: Apache-2.0
"""The tuning table: the times of calls on this machine, by algorithm and segment size.

Decides the form of the file (tuning.schema.json), which machines and builds may use one, and its
answer to a request. Pure but for reading the file: every rank with an equal table comes to the same
answer. Must not know how anything was measured.

A table overrides the model only if the intervals of the two algorithms lie apart. One measurement
of two equally fast algorithms names a winner too, and another one the next time. An interval spans
the medians of the rounds: windows of one round share a state of the machine, so a round counts as
one sample.
"""

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcoll.choose.costs import Costs
from fastcoll.documents import read_json, worst_fault
from fastcoll.errors import UsageError
from fastcoll.types import REDUCTIONS, Request, nccl_adds

SCHEMA_NAME = "fastcoll-tuning-1"
_SCHEMA_PATH = Path(__file__).with_name("tuning.schema.json")
_MOST_BYTES = 64 << 20  # of a file: no tuning run writes that much
Json = dict[str, Any]

# The name in a row for reductions whose parts NCCL moves and a kernel of ours adds.
NCCL_MOVES = "nccl_moves"
# _Key -> segment -> [(bytes, (us, low us, high us))], bytes ascending.
# On CPUs a key is (verb, ranks, algorithm, CPUs between them).
# On GPUs it is (verb, ranks, algorithm, ranks per GPU, channels).
_Key = tuple[str | int, ...]
_Times = tuple[float, float, float]
_Curves = dict[int, list[tuple[int, _Times]]]


@dataclass(frozen=True)
class Measured:
    """The table's answer for one algorithm: its time with the best segment size, and that size.

    `low_us` to `high_us` is the interval of the time, as far as the measurement could tell.
    """

    time_us: float
    low_us: float
    high_us: float
    segment_bytes: int


class TuningTable:
    """A table that was read and found to be this machine's."""

    def __init__(self, document: Json) -> None:
        content = {key: document[key] for key in ("costs", "rows")}
        on_gpus: Json = document.get("gpu", {"machine": None, "rows": []})
        if on_gpus["rows"]:
            content["gpu"] = {key: on_gpus[key] for key in ("machine", "rows")}
        text = json.dumps(content, sort_keys=True)
        # Equal on two ranks exactly if they choose alike by their tables.
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.date: str = document["date"]
        self.num_rows = len(document["rows"])
        self.costs = Costs(**document["costs"])  # the cost model's constants, fitted
        # The GPUs that its rows of GPUs were measured on; None if it has no such rows.
        self.gpus: Json | None = on_gpus["machine"] if on_gpus["rows"] else None
        self.num_gpu_rows = len(on_gpus["rows"])  # how many it has
        self._curves: dict[_Key, _Curves] = {}
        for row in sorted(
            [*document["rows"], *on_gpus["rows"]], key=lambda row: int(row["size_bytes"])
        ):
            names = ("num_cpus",) if "num_cpus" in row else ("ranks_per_gpu", "num_channels")
            where = (int(row[name]) for name in names)
            key = (row["verb"], int(row["world_size"]), row["algorithm"], *where)
            # Kernels cut messages by themselves.
            segment_bytes = int(row.get("segment_bytes", 0))
            points = self._curves.setdefault(key, {}).setdefault(segment_bytes, [])
            low_us, time_us, high_us = (
                float(row[name]) for name in ("low_us", "time_us", "high_us")
            )
            times = (time_us, min(low_us, time_us), max(high_us, time_us))
            points.append((int(row["size_bytes"]), times))

    def measured(self, request: Request, algorithm: str) -> Measured | None:
        """Return the time of a request by an algorithm, between the sizes that were measured.

        Bytes decide, not the dtype. None outside those sizes, for other worlds, where as many
        ranks share other numbers of CPUs, GPUs or channels, and for parts of uneven size.
        """
        if request.splits:
            return None
        world = request.world_size
        if request.on_gpu:
            where: _Key = (request.ranks_per_gpu, request.num_channels)
            algorithm = _name_on_gpus(request, algorithm)
        else:
            where = (min(world, request.num_cpus),)
        key = (request.verb.name, world, algorithm, *where)
        found = [
            Measured(*times, segment_bytes)
            for segment_bytes, points in self._curves.get(key, {}).items()
            if (times := _between(points, request.staged_bytes)) is not None
        ]
        return min(found, key=lambda one: (one.time_us, one.segment_bytes), default=None)


def _name_on_gpus(request: Request, algorithm: str) -> str:
    """Return an algorithm's name in the rows: NCCL has two, as it adds or only moves."""
    any_order = request.numerics == "fast"
    if algorithm != "nccl" or request.verb not in REDUCTIONS:
        return algorithm
    return algorithm if nccl_adds(request.dtype, request.op, any_order=any_order) else NCCL_MOVES


def _between(points: list[tuple[int, _Times]], size_bytes: int) -> _Times | None:
    """Return the times at a size, straight between its neighbours in a log-log picture."""
    if not points or not points[0][0] <= size_bytes <= points[-1][0]:
        return None
    at = bisect_left([num_bytes for num_bytes, _ in points], size_bytes)
    right_bytes, right = points[at]
    if right_bytes == size_bytes:
        return right
    left_bytes, left = points[at - 1]
    share = math.log(size_bytes / left_bytes) / math.log(right_bytes / left_bytes)
    time_us, low_us, high_us = (
        left_us * (right_us / left_us) ** share
        for left_us, right_us in zip(left, right, strict=True)
    )
    return time_us, low_us, high_us


def validate(document: object) -> None:
    """Check a table against its schema.

    Raises:
        UsageError: It does not fit; the text says where.
    """
    fault: Any = worst_fault(document, _SCHEMA_PATH)
    if fault is not None:
        where = fault.json_path.replace("$", "", 1) or "the whole file"
        raise UsageError(f"{where}: {fault.message[:200]}")


def read_table(path: Path, identity: Mapping[str, object]) -> TuningTable:
    """Read a table and hold it against this machine and this build.

    Args:
        path: The file.
        identity: The parts "build" and "machine" that the file must have.

    Raises:
        UsageError: There is no such file, it is no table, or it is another machine's or build's.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path}: more than {_MOST_BYTES} bytes are no tuning table")
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror or error}") from None
    document = read_json(path)
    try:
        validate(document)
        return TuningTable(_check_identity(document, identity))
    except UsageError as error:
        raise UsageError(f"{path}: {error}; make one with `fastcoll tune`") from None


def _check_identity(document: Json, identity: Mapping[str, object]) -> Json:
    for part, kind in (("build", "stale: made by"), ("machine", "foreign: made on")):
        if other := difference(document[part], identity[part]):
            raise UsageError(f"{kind} another {part}: {other}")
    _refuse_duplicate_rows(document["rows"], ".rows")
    _refuse_duplicate_rows(document.get("gpu", {"rows": []})["rows"], ".gpu.rows")
    return document


def difference(there: Mapping[str, object], here: object) -> str:
    """Return the first fact of a table's machine or build that differs here; empty: none."""
    for name, value in json.loads(json.dumps(here)).items():
        if (other := there.get(name)) != value:
            return f"{name} is {other!r} there, {value!r} here"
    return ""


def _refuse_duplicate_rows(rows: list[Json], where: str) -> None:
    seen: set[tuple[object, ...]] = set()
    for idx, row in enumerate(rows):
        key = tuple(row[name] for name in sorted(row) if not name.endswith("_us"))
        if key in seen:
            raise UsageError(f"{where}[{idx}]: measured twice")
        seen.add(key)
