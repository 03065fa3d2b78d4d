# SPDX-License-Identifier: Apache-2.0
"""`fastcoll regret`: how far the chosen algorithm is from the best one, measured.

Decides what counts as a good choice: the chosen one takes at most a tenth longer than the best, or
the two can't be told apart. Verbs with one algorithm have no points.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastcoll import algorithms, tuning
from fastcoll.measure.pattern import Cell, make_cell
from fastcoll.measure.pool import NotMeasured, Pool
from fastcoll.measure.results import provenance
from fastcoll.measure.rounds import Outcome, measure_cell
from fastcoll.measure.timer import Budget, median_interval
from fastcoll.measure.variants import Variant, request_of, running_ranks
from fastcoll.selection import TuningTable, select
from fastcoll.types import Numerics

VERBS = ("all_reduce", "reduce_scatter", "reduce")
LIMIT = 0.10
_BUDGET = Budget(window_us=1500, min_windows=3, max_windows=9, num_rounds=4)
_NUMERICS: tuple[Numerics, ...] = ("same_bits", "fast")
Json = dict[str, Any]


@dataclass(frozen=True)
class RegretSettings:
    """The points: every verb, size and world."""

    worlds: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    verbs: tuple[str, ...] = VERBS
    dtype: str = "float32"

    def cells(self) -> list[Cell]:
        """Return the points."""
        return [
            make_cell(verb, self.dtype, "sum", size_bytes, world)
            for world in self.worlds
            for verb in self.verbs
            for size_bytes in self.sizes_bytes
        ]


def contenders(pool: Pool, cell: Cell, table: TuningTable | None) -> list[Variant]:
    """Return every algorithm that runs a cell, as a call that names it would run."""
    request = request_of(cell, "fast")
    names = [one.name for one in algorithms.ALL if one.admits(request) is None]
    plans = [select(replace(request, algorithm=name), algorithms.ALL, table).plan for name in names]
    return [
        Variant(pool, name, plan.segment_bytes) for name, plan in zip(names, plans, strict=True)
    ]


def judge(
    cell: Cell, numerics: Numerics, times: dict[str, Json], table: TuningTable | None
) -> Json:
    """Return one row: what was chosen, what was best, and whether they can be told apart.

    Args:
        cell: The point.
        numerics: "same_bits" admits fewer algorithms, to choose and to be best.
        times: By algorithm: median and its 95 % interval.
        table: What the choice is made by.
    """
    request = request_of(cell, numerics)
    chosen = select(request, algorithms.ALL, table).plan.algorithm.name
    admitted = [one.name for one in algorithms.ALL if one.admits(request) is None]
    best = min(admitted, key=lambda name: float(times[name]["time_us"]))
    regret = times[chosen]["time_us"] / times[best]["time_us"] - 1
    return {
        "verb": cell.verb,
        "world_size": cell.world_size,
        "num_cpus": request.num_cpus,
        "size_bytes": cell.size_bytes,
        "numerics": numerics,
        "chosen": chosen,
        "best": best,
        "regret": float(f"{regret:.4g}"),
        "is_tie": times[chosen]["low_us"] <= times[best]["high_us"],
        "times": {name: times[name] for name in admitted},
    }


def _times(outcomes: Sequence[Outcome], variants: Sequence[Variant]) -> dict[str, Json]:
    times = {}
    for outcome, variant in zip(outcomes, variants, strict=True):
        if outcome.summary is None:
            raise NotMeasured(f"{variant.name}: {outcome.reason}")
        slowest = [max(window) for window in outcome.windows_us]
        low_us, high_us = median_interval(slowest)
        numbers = {"time_us": outcome.summary.time_us, "low_us": low_us, "high_us": high_us}
        times[variant.algorithm] = {
            **{name: float(f"{value:.5g}") for name, value in numbers.items()},
            "num_windows": len(slowest),
            "segment_bytes": variant.segment_bytes,
        }
    return times


def is_good(row: Json) -> bool:
    """Return whether a row's choice was within the limit of the best, or tied with it."""
    return bool(row["is_tie"] or row["regret"] <= LIMIT)


def run_regret(
    settings: RegretSettings, folder: Path, on_turn: Callable[[Cell, str], None]
) -> Json:
    """Measure all algorithms at all points, each point interleaved; return the result document.

    Args:
        folder: An empty folder for sockets; its path must be short.
        on_turn: Called with a point and an algorithm before each turn.

    Raises:
        NotMeasured: An algorithm failed, or computed something wrong.
    """
    origin, tuned = provenance(), tuning.find()
    rows: list[Json] = []
    for world in settings.worlds:
        with running_ranks(world, folder) as pool:
            for cell in settings.cells():
                if cell.world_size != world:
                    continue
                variants = contenders(pool, cell, tuned.table)
                outcomes = measure_cell(variants, cell, _BUDGET, partial(on_turn, cell))
                times = _times(outcomes, variants)
                rows += [judge(cell, numerics, times, tuned.table) for numerics in _NUMERICS]
    num_within = sum(map(is_good, rows))
    return {
        "kind": "regret",
        **origin,
        "settings": {**asdict(settings), "world_size": max(settings.worlds), "limit": LIMIT},
        "tuning": tuned.table.digest if tuned.table else "none",
        "num_points": len(rows),
        "num_within": num_within,
        "share_within": round(num_within / len(rows), 4),
        "rows": rows,
    }
