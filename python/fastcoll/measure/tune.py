# SPDX-License-Identifier: Apache-2.0
"""`fastcoll tune`: measure this machine into a tuning table.

Decides what is measured, in which order, and what is kept of a run that was interrupted. The form
of the table is selection.table's matter.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from fastcoll import tuning
from fastcoll.costs import Costs
from fastcoll.errors import UsageError
from fastcoll.measure.fit import Fit, Point, fit
from fastcoll.measure.machine import now
from fastcoll.measure.pattern import Cell, make_cell
from fastcoll.measure.pool import NotMeasured, Pool
from fastcoll.measure.results import command_line
from fastcoll.measure.rounds import measure_cell
from fastcoll.measure.timer import Budget, median_interval
from fastcoll.measure.variants import VERBS, request_of, running_ranks, variants_of
from fastcoll.selection.table import SCHEMA_NAME, validate

_DTYPE = "float32"
_BUDGET = Budget(window_us=1500, min_windows=2, max_windows=7, num_rounds=3)
Json = dict[str, Any]


@dataclass(frozen=True)
class TuneSettings:
    """What one run measures, and how long it may take."""

    worlds: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    verbs: tuple[str, ...] = VERBS
    limit_s: float = 270.0

    def cells(self) -> list[Cell]:
        """Return all points, in the order in which they are measured: by world, verb and size."""
        return [
            make_cell(verb, _DTYPE, "sum", size_bytes, world)
            for world in self.worlds
            for verb in self.verbs
            for size_bytes in self.sizes_bytes
            if size_bytes >= world * 4  # each rank's part has an element
        ]


def _point_of(cell: Cell) -> Json:
    request = request_of(cell, "fast")
    return {
        "verb": cell.verb,
        "world_size": cell.world_size,
        "num_cpus": request.num_cpus,
        "size_bytes": request.staged_bytes,
    }


def measured_rows(pool: Pool, cell: Cell, on_turn: Callable[[str], None]) -> list[Json]:
    """Return the table's rows of one point: every variant, checked, then timed in turns.

    Raises:
        NotMeasured: A variant failed or computed something wrong: there is nothing to choose from.
    """
    variants = variants_of(pool, cell)
    rows = []
    for variant, outcome in zip(
        variants, measure_cell(variants, cell, _BUDGET, on_turn), strict=True
    ):
        if variant.may_be_refused and (outcome.reason or "").startswith("UnsupportedError"):
            continue
        if outcome.summary is None:
            raise NotMeasured(
                f"{cell.verb} of {cell.size_bytes} bytes by {variant.name}: {outcome.reason}"
            )
        low_us, high_us = median_interval([max(window) for window in outcome.windows_us])
        times = {"time_us": outcome.summary.time_us, "low_us": low_us, "high_us": high_us}
        rows.append(
            _point_of(cell)
            | {"algorithm": variant.algorithm, "segment_bytes": variant.segment_bytes}
            | {name: float(f"{value:.4g}") for name, value in times.items()}
        )
    return rows


def fit_rows(rows: Sequence[Json]) -> Fit | None:
    """Fit the cost model to a table's rows: each algorithm's best segment size at each point."""
    best: dict[tuple[Any, ...], Point] = {}
    for row in rows:
        cell = make_cell(row["verb"], _DTYPE, "sum", row["size_bytes"], row["world_size"])
        if row["algorithm"] == "single_copy":
            continue  # what the kernel takes for it is none of the model's constants
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
    head = {key: value for key, value in document.items() if key != "rows"}
    lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
    rows = ",\n  ".join(json.dumps(row) for row in document["rows"])
    text = "{\n" + "".join(lines) + ' "rows": [\n  ' + rows + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    beside.replace(path)


def _rows_of_before(path: Path) -> list[Json]:
    """Return what an interrupted run left of this machine, nothing if it left nothing."""
    try:
        document: Json = json.loads(path.read_text())
        validate(document)
    except (OSError, ValueError, UsageError):
        return []
    same = all(document[part] == mine for part, mine in tuning.identity().items())
    return document["rows"] if same and not document["is_complete"] else []


def run_tune(
    settings: TuneSettings,
    path: Path,
    folder: Path,
    on_point: Callable[[Cell, str], None],
    fallback: Costs,
) -> Json:
    """Measure, write the table after every point, and return it.

    Args:
        path: Where the table goes. One that lies there and is not complete is gone on with.
        folder: An empty folder for sockets; its path must be short.
        on_point: Called with a point and a variant before each turn.
        fallback: The constants if too little was measured to fit them.

    Raises:
        NotMeasured: A variant failed, or computed something wrong.
    """
    deadline = monotonic() + settings.limit_s
    rows = _rows_of_before(path)
    known = {tuple(row[name] for name in _point_of(settings.cells()[0])) for row in rows}
    todo = [cell for cell in settings.cells() if tuple(_point_of(cell).values()) not in known]
    for world in settings.worlds:
        mine = [cell for cell in todo if cell.world_size == world]
        if not mine or monotonic() > deadline:
            continue
        with running_ranks(world, folder) as pool:
            for cell in mine:
                if monotonic() > deadline:
                    break
                rows += measured_rows(pool, cell, partial(on_point, cell))
                todo.remove(cell)
                write_table(make_document(rows, is_complete=False, fallback=fallback), path)
    document = make_document(rows, is_complete=not todo, fallback=fallback)
    write_table(document, path)
    return document
