# SPDX-License-Identifier: Apache-2.0
"""`fastcoll regret`: how far the chosen algorithm is from the best one, measured.

Decides when a choice is good: it takes at most a tenth longer than the best, or the two can't be
told apart. Calls that one algorithm alone can carry out are not timed, but listed.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from fastcoll import env
from fastcoll.choose import TuningTable, algorithms, select, tuning
from fastcoll.measure.pattern import Cell
from fastcoll.measure.pool import NotMeasured, Pool, own_pool
from fastcoll.measure.results import provenance
from fastcoll.measure.rounds import Outcome, measure_cell
from fastcoll.measure.timer import Budget, median_interval
from fastcoll.measure.variants import Points, Variant, request_of
from fastcoll.types import REDUCTIONS, Numerics, Request, SingleCopy, Verb

LIMIT = 0.10
_BUDGET = Budget(window_us=1500, min_windows=3, max_windows=9, num_rounds=4)
Json = dict[str, Any]


def admitted(request: Request) -> list[str]:
    """Return the names of the algorithms that can carry out a request."""
    return [one.name for one in algorithms.ALL if one.admits(request) is None]


def contenders(pool: Pool, cell: Cell, table: TuningTable | None) -> list[Variant]:
    """Return every algorithm that runs a cell, as a call that names it would run."""
    single_copy = cast(SingleCopy, env.SINGLE_COPY.get())
    request = request_of(cell, "fast", single_copy=single_copy)
    names = admitted(request)
    plans = [select(replace(request, algorithm=name), algorithms.ALL, table).plan for name in names]
    return [
        Variant(pool, name, plan.segment_bytes) for name, plan in zip(names, plans, strict=True)
    ]


def judge(request: Request, cell: Cell, times: dict[str, Json], table: TuningTable | None) -> Json:
    """Return one row: the chosen and the best algorithm, and whether they can be told apart.

    Args:
        request: The call. Its numerics and its single copies decide which algorithms there are to
            choose from.
        cell: The point.
        times: By algorithm: median and its 95 % interval.
        table: The table for the choice; None: the model chooses.
    """
    chosen = select(request, algorithms.ALL, table).plan.algorithm.name
    names = admitted(request)
    best = min(names, key=lambda name: float(times[name]["time_us"]))
    regret = times[chosen]["time_us"] / times[best]["time_us"] - 1
    return {
        **_point(cell),
        "num_cpus": request.num_cpus,
        "numerics": request.numerics,
        "chosen": chosen,
        "best": best,
        "regret": float(f"{regret:.4g}"),
        "is_tie": times[chosen]["low_us"] <= times[best]["high_us"],
        "times": {name: times[name] for name in names},
    }


def _point(cell: Cell) -> Json:
    return {"verb": cell.verb, "world_size": cell.world_size, "size_bytes": cell.size_bytes}


def no_choice(request: Request, cell: Cell) -> Json:
    """Return why there is nothing to choose at a point: the other algorithms' reasons."""
    reasons = {one.name: one.admits(request) for one in algorithms.ALL}
    [only] = admitted(request)
    return {
        **_point(cell),
        "only": only,
        "refused": {name: reason for name, reason in reasons.items() if reason is not None},
    }


def _times(outcomes: Sequence[Outcome], variants: Sequence[Variant]) -> dict[str, Json]:
    """Return the times, without variants that the ranks of this machine may not use."""
    times = {}
    for outcome, variant in zip(outcomes, variants, strict=True):
        if variant.may_fail_for(outcome.reason or ""):
            continue
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


def _requests(cell: Cell, times: dict[str, Json]) -> list[Request]:
    """Return the calls of a point: a reduction in rank order, and in any.

    Args:
        cell: The point.
        times: Its measurements; empty if there is nothing to choose.
    """
    asked = cast(SingleCopy, env.SINGLE_COPY.get())
    single_copy: SingleCopy = asked if not times or "single_copy" in times else "never"
    kinds: tuple[Numerics, ...] = ("same_bits", "fast")
    kinds = kinds if Verb[cell.verb] in REDUCTIONS else kinds[:1]
    return [request_of(cell, numerics, single_copy=single_copy) for numerics in kinds]


def is_good(row: Json) -> bool:
    """Return whether a row's choice was within the limit of the best, or tied with it."""
    return bool(row["is_tie"] or row["regret"] <= LIMIT)


def run_regret(settings: Points, folder: Path, on_turn: Callable[[Cell, str], None]) -> Json:
    """Measure all algorithms at all points, each point interleaved; return the result document.

    Args:
        folder: An empty folder for sockets; its path must be short.
        on_turn: Called with a point and an algorithm before each turn.

    Raises:
        NotMeasured: An algorithm failed, or computed something wrong; or no point has two.
    """
    origin, tuned = provenance(), tuning.find()
    rows: list[Json] = []
    without: list[Json] = []
    for world in settings.worlds:
        with own_pool("fastcoll_variants", world, folder) as pool:
            for cell in settings.cells():
                if cell.world_size != world:
                    continue
                variants = contenders(pool, cell, tuned.table)
                times: dict[str, Json] = {}
                if len(variants) > 1:
                    outcomes = measure_cell(variants, cell, _BUDGET, partial(on_turn, cell))
                    times = _times(outcomes, variants)
                for request in _requests(cell, times):
                    if len(admitted(request)) > 1:
                        rows.append(judge(request, cell, times, tuned.table))
                    else:
                        without.append(no_choice(request, cell))
    if not rows:
        raise NotMeasured("there is nothing to choose from at any point")
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
        "no_choice": without,
    }
