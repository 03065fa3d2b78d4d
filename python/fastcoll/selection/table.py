# SPDX-License-Identifier: Apache-2.0
"""The tuning table: what calls took on this machine, by algorithm and segment size.

Decides the form of the file (tuning.schema.json), who may use one, and what it says of a request.
Pure but for reading the file: every rank with an equal table comes to the same answer. Must not
know how anything was measured.
"""

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fastcoll.costs import Costs
from fastcoll.documents import read_json
from fastcoll.errors import UsageError
from fastcoll.types import Request

SCHEMA_NAME = "fastcoll-tuning-1"
_SCHEMA_PATH = Path(__file__).with_name("tuning.schema.json")
_MOST_BYTES = 64 << 20  # of a file: nobody measures that much
Json = dict[str, Any]

# (verb, ranks, CPUs between them, algorithm) -> segment -> [(bytes, us)], bytes ascending.
_Key = tuple[str, int, int, str]
_Curves = dict[int, list[tuple[int, float]]]


@dataclass(frozen=True)
class Measured:
    """What the table says of one algorithm: its time with the best segment size, and that size."""

    time_us: float
    segment_bytes: int


class TuningTable:
    """A table that was read and found to be this machine's.

    Attributes:
        digest: Equal on two ranks exactly if they choose alike by their tables.
        costs: The cost model's constants, fitted to the measurements.
    """

    def __init__(self, document: Json) -> None:
        content = {key: document[key] for key in ("costs", "rows")}
        text = json.dumps(content, sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.date: str = document["date"]
        self.num_rows = len(document["rows"])
        self.costs = Costs(**document["costs"])
        self._curves: dict[_Key, _Curves] = {}
        for row in sorted(document["rows"], key=lambda row: int(row["size_bytes"])):
            key = (row["verb"], int(row["world_size"]), int(row["num_cpus"]), row["algorithm"])
            points = self._curves.setdefault(key, {}).setdefault(int(row["segment_bytes"]), [])
            points.append((int(row["size_bytes"]), float(row["time_us"])))

    def measured(self, request: Request, algorithm: str) -> Measured | None:
        """Return what a request takes by an algorithm, between the sizes that were measured.

        Whatever the dtype: bytes decide. None outside those sizes, for other worlds, on GPUs and
        for parts of uneven size.
        """
        if request.on_gpu or request.splits:
            return None
        world = request.world_size
        key = (request.verb.name, world, min(world, request.num_cpus), algorithm)
        found = [
            Measured(time_us, segment_bytes)
            for segment_bytes, points in self._curves.get(key, {}).items()
            if (time_us := _between(points, request.staged_bytes)) is not None
        ]
        return min(found, key=lambda one: (one.time_us, one.segment_bytes), default=None)


def _between(points: list[tuple[int, float]], size_bytes: int) -> float | None:
    """Return the time at a size, straight between its neighbours in a log-log picture."""
    if not points or not points[0][0] <= size_bytes <= points[-1][0]:
        return None
    at = bisect_left(points, (size_bytes, 0.0))
    right_bytes, right_us = points[at]
    if right_bytes == size_bytes:
        return right_us
    left_bytes, left_us = points[at - 1]
    share = math.log(size_bytes / left_bytes) / math.log(right_bytes / left_bytes)
    return float(left_us * (right_us / left_us) ** share)


@cache
def _schema() -> Json:
    schema: Json = json.loads(_SCHEMA_PATH.read_text())
    return schema


def validate(document: object) -> None:
    """Check a table against its schema.

    Raises:
        UsageError: It does not fit; the text says where.
    """
    import jsonschema  # here: fastcoll itself needs torch and numpy alone

    try:
        jsonschema.validate(document, _schema())
    except jsonschema.ValidationError as error:
        where = error.json_path.replace("$", "", 1) or "the whole file"
        raise UsageError(f"{where}: {error.message[:200]}") from None


def read_table(path: Path, identity: Mapping[str, object]) -> TuningTable:
    """Read a table and hold it against this machine and this build.

    Args:
        path: The file.
        identity: What must be equal: the parts "build" and "machine" of the file.

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
        return TuningTable(_held_against(document, identity))
    except UsageError as error:
        raise UsageError(f"{path}: {error}; make one with `fastcoll tune`") from None


def _held_against(document: Json, identity: Mapping[str, object]) -> Json:
    for part, kind in (("build", "stale: made by"), ("machine", "foreign: made on")):
        mine = json.loads(json.dumps(identity[part]))
        for name, value in mine.items():
            if (other := document[part].get(name)) != value:
                raise UsageError(
                    f"{kind} another {part}: {name} is {other!r} there, {value!r} here"
                )
    seen: set[tuple[object, ...]] = set()
    for idx, row in enumerate(document["rows"]):
        key = tuple(value for name, value in row.items() if not name.endswith("_us"))
        if key in seen:
            raise UsageError(f".rows[{idx}]: measured twice")
        seen.add(key)
    return document
