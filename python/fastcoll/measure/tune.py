# SPDX-License-Identifier: Apache-2.0
"""`fastcoll tune`: measure this machine into a tuning table.

Decides the points to measure, their order, and the rows to keep of a run that was interrupted. The
form of the table is in choose.table.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from fastcoll.choose import tuning
from fastcoll.choose.costs import Costs
from fastcoll.choose.table import SCHEMA_NAME, validate
from fastcoll.errors import UsageError
from fastcoll.machine import gpu
from fastcoll.measure.fit import Fit, Point, fit
from fastcoll.measure.machine import now
from fastcoll.measure.on_gpus import OnGpus
from fastcoll.measure.pattern import Cell, make_cell
from fastcoll.measure.pool import NotMeasured, Pool, own_pool
from fastcoll.measure.results import command_line, in_lines
from fastcoll.measure.rounds import Contender, measure_cell
from fastcoll.measure.timer import Budget, rounds_interval
from fastcoll.measure.variants import Points, Variant, request_of, variants_of
from fastcoll.trust import require_trusted

# Many short rounds: passing load on the machine then meets all variants alike.
_BUDGET = Budget(window_us=1500, min_windows=2, max_windows=4, num_rounds=8)
Json = dict[str, Any]


@dataclass(frozen=True)
class TuneSettings(Points):
    """The points that one run measures, and how long it may take."""

    limit_s: float = 270.0

    def cells(self, least_bytes: int = 4) -> list[Cell]:
        """Return the points in the order in which they are measured: each rank has an element."""
        return super().cells(least_bytes)


class Place(Protocol):
    """Where ranks are measured: on CPUs, or on GPUs."""

    def point(self, cell: Cell, /) -> Json:
        """Return the fields that tell a cell's rows from others, before any rank runs."""

    def running(self, world_size: int, /) -> AbstractContextManager[Contender]:
        """Start ranks that take any variant."""

    def variants(self, ranks: Any, cell: Cell, /) -> Sequence[Variant]:
        """Return all ways to carry out a cell's call."""

    def leave_out(self, variant: Any, reason: str, /) -> None:
        """Note that an excused variant could not be measured."""


@dataclass(frozen=True)
class OnCpus:
    """Ranks on this machine's CPUs; `folder` is an empty one for sockets, of a short path."""

    folder: Path

    def point(self, cell: Cell) -> Json:
        request = request_of(cell, "fast")
        return {
            "verb": cell.verb,
            "world_size": cell.world_size,
            "num_cpus": request.num_cpus,
            "size_bytes": request.staged_bytes,
        }

    def running(self, world_size: int) -> AbstractContextManager[Pool]:
        return own_pool("fastcoll_variants", world_size, self.folder)

    def variants(self, ranks: Contender, cell: Cell) -> Sequence[Variant]:
        return variants_of(ranks, cell)

    def leave_out(self, variant: Variant, reason: str) -> None:
        """Nothing to note: that ranks may not read each other's memory is no matter of a size."""


def measured_rows(
    place: Place, ranks: Contender, cell: Cell, on_turn: Callable[[str], None]
) -> list[Json]:
    """Return the table's rows of one point: every variant, checked, then timed in turns.

    Raises:
        NotMeasured: A variant failed or computed something wrong: there is nothing to choose from.
    """
    variants = place.variants(ranks, cell)
    rows = []
    for variant, outcome in zip(
        variants, measure_cell(variants, cell, _BUDGET, on_turn), strict=True
    ):
        if outcome.summary is None:
            reason = outcome.reason or "nothing was timed"
            if variant.may_fail_for(reason):
                place.leave_out(variant, reason)
                continue
            raise NotMeasured(f"{cell.verb} of {cell.size_bytes} bytes by {variant.name}: {reason}")
        slowest = [max(window) for window in outcome.windows_us]
        low_us, high_us = rounds_interval(slowest, _BUDGET.num_rounds)
        times = {"time_us": outcome.summary.time_us, "low_us": low_us, "high_us": high_us}
        rows.append(
            place.point(cell)
            | variant.row
            | {name: float(f"{value:.4g}") for name, value in times.items()}
        )
    return rows


def measure_missing(
    settings: TuneSettings,
    place: Place,
    rows: list[Json],
    on_point: Callable[[Cell, str], None],
    save: Callable[[bool], None],
) -> None:
    """Add to `rows` the missing rows of the points, as far as the time goes.

    Args:
        on_point: Called with a point and a variant before each turn.
        save: Called after every point and at the end: is all of it there?

    Raises:
        NotMeasured: A variant failed, or computed something wrong.
    """
    deadline = monotonic() + settings.limit_s
    todo = [cell for cell in settings.cells() if not _has_rows(place.point(cell), rows)]
    for world in settings.worlds:
        mine = [cell for cell in todo if cell.world_size == world]
        if not mine or monotonic() > deadline:
            continue
        with place.running(world) as ranks:
            for cell in mine:
                if monotonic() > deadline:
                    break
                rows += measured_rows(place, ranks, cell, partial(on_point, cell))
                todo.remove(cell)
                save(False)
    save(not todo)


def _has_rows(point: Json, rows: Sequence[Json]) -> bool:
    return any(point.items() <= row.items() for row in rows)


def fit_rows(rows: Sequence[Json]) -> Fit | None:
    """Fit the cost model to a table's rows: each algorithm's best segment size at each point."""
    best: dict[tuple[Any, ...], Point] = {}
    for row in rows:
        cell = make_cell(row["verb"], Points.dtype, "sum", row["size_bytes"], row["world_size"])
        if row["algorithm"] == "single_copy":
            continue  # the kernel's time for it is none of the model's constants
        point = Point(request_of(cell, "fast"), row["algorithm"], row["time_us"])
        key = (row["verb"], row["world_size"], row["size_bytes"], row["algorithm"])
        if key not in best or point.time_us < best[key].time_us:
            best[key] = point
    return fit(list(best.values()))


def make_document(rows: Sequence[Json], *, is_complete: bool, fallback: Costs) -> Json:
    """Return the table of some rows; `fallback`: the constants if the rows are too few to fit."""
    found = fit_rows(rows) or Fit(fallback, 0.0, 0.0)
    errors = {"median_error": found.median_error, "worst_error": found.worst_error}
    return {
        "schema": SCHEMA_NAME,
        "command": command_line(),
        "date": now(),
        "is_complete": is_complete,
        **tuning.identity(),
        "costs": asdict(found.costs),
        "fit": {name: float(f"{value:.3g}") for name, value in errors.items()},
        "rows": list(rows),
    }


def write_table(document: Json, path: Path) -> None:
    """Check a table and write it, whole or not at all.

    Raises:
        UsageError: It does not fit the schema; nothing is written.
    """
    validate(json.loads(json.dumps(document)))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(in_lines(document) + "\n")
    beside.replace(path)


def _document_of_before(path: Path) -> Json | None:
    """Return the table that lies at `path` if it is this machine's, else None."""
    try:
        document: Json = json.loads(require_trusted(path).read_text())
        validate(document)
    except (OSError, ValueError, UsageError):
        return None
    same = all(document[part] == mine for part, mine in tuning.identity().items())
    return document if same else None


def run_tune(
    settings: TuneSettings,
    path: Path,
    folder: Path,
    on_point: Callable[[Cell, str], None],
    fallback: Costs,
) -> Json:
    """Measure CPUs, write the table after every point, and return it.

    Args:
        path: Where the table goes. One that lies there and is not complete is gone on with; its
            rows of GPUs are kept.
        folder: An empty folder for sockets; its path must be short.
        on_point: Called with a point and a variant before each turn.
        fallback: The constants if too little was measured to fit them.

    Raises:
        NotMeasured: A variant failed, or computed something wrong.
    """
    before = _document_of_before(path) or {"is_complete": True}
    rows: list[Json] = [] if before["is_complete"] else before["rows"]
    document: Json = {}

    def save(is_complete: bool) -> None:
        document.update(make_document(rows, is_complete=is_complete, fallback=fallback))
        document.update({key: before[key] for key in ("gpu",) if key in before})
        write_table(document, path)

    measure_missing(settings, OnCpus(folder), rows, on_point, save)
    return document


def run_gpu_tune(
    settings: TuneSettings,
    path: Path,
    place: OnGpus,
    on_point: Callable[[Cell, str], None],
    fallback: Costs,
) -> Json:
    """Measure GPUs, write the table after every point, and return it.

    Args:
        path: Where the table goes. Of an old table there the rows of CPUs are kept, and those of
            other points on the same GPUs. All rows of an interrupted run are kept, too.
        place: Where ranks run.
        on_point: Called with a point and a variant before each turn.
        fallback: The constants of a table that has no rows of CPUs.

    Raises:
        NotMeasured: A variant failed, or computed something wrong.
    """
    document = _document_of_before(path) or make_document([], is_complete=False, fallback=fallback)
    machine = json.loads(json.dumps(gpu.fingerprint()))
    before = document.get("gpu", {"machine": None})
    if before["machine"] != machine:
        before = {"is_complete": False, "left_out": {}, "rows": []}
    rows: list[Json] = before["rows"]
    if not before["is_complete"]:
        place.left_out.update(before["left_out"])
    else:
        anew = [place.point(cell) for cell in settings.cells()]
        rows = [row for row in rows if not any(_has_rows(point, [row]) for point in anew)]

    def save(is_complete: bool) -> None:
        document["gpu"] = {
            "command": command_line(),
            "date": now(),
            "is_complete": is_complete,
            "machine": machine,
            "left_out": place.left_out,
            "rows": rows,
        }
        write_table(document, path)

    measure_missing(settings, place, rows, on_point, save)
    return document
