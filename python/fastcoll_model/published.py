# SPDX-License-Identifier: Apache-2.0
"""The model against published measurements of others (`published.json`).

Decides how the two scores are made. For the first, one alpha and one beta, fitted to every second
size of a series, predict the sizes between. The second takes the shipped constants alone, fitted to
nothing. Every row is kept, the bad ones too.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastcoll_model.builders import algorithms_of
from fastcoll_model.documents import check, read_json
from fastcoll_model.errors import ModelError
from fastcoll_model.explain import priced
from fastcoll_model.formulas import Constants
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.machines.machine import MACHINES, load_machine

_DATA = Path(__file__).with_name("published.json")
_SCHEMA = Path(__file__).with_name("published.schema.json")
_NCCL = ("ring", "double_binary_tree", "multimem")  # NCCL's choices, in the words of `builders`


@dataclass(frozen=True)
class Row:
    """One size of a series: published and predicted."""

    system: str
    source: str
    size_bytes: int
    published_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """Relative: 0.1 if the prediction is 10 % too high."""
        return self.predicted_us / self.published_us - 1


def read_series(path: Path) -> list[dict[str, Any]]:
    """Read published series.

    Raises:
        ModelError: It is no such file; the text says where it is wrong, and how to correct it.
    """
    document = read_json(path)
    check(document, json.loads(_SCHEMA.read_text(encoding="utf-8")), str(path))
    series: list[dict[str, Any]] = document["series"]
    for i, one in enumerate(series):
        where = f"{path}: at series/{i}"
        sizes = [size for size, _ in one["points"]]
        if sizes != sorted(set(sizes)):
            raise ModelError(f"{where}/points: put the sizes in ascending order, each once")
        if one["machine"] and one["machine"] not in MACHINES:
            known = ", ".join(MACHINES)
            raise ModelError(f"{where}/machine: no machine {one['machine']!r}; there are {known}")
        if one["machine"] and one["algorithm"] not in ("nccl", *algorithms_of("all_reduce")):
            raise ModelError(f"{where}/algorithm: no algorithm {one['algorithm']!r} of all_reduce")
    return series


def load_series(machine: str | None = None) -> list[dict[str, Any]]:
    """Return the series that come with fastcoll: all, or those of one machine's name."""
    return [one for one in read_series(_DATA) if machine in (None, one["machine"])]


def fit(points: Sequence[tuple[float, float]]) -> Constants:
    """Return alpha and beta of the line through (bytes, us) with the least relative error.

    Least squares of predicted / published - 1; needs two different sizes.
    """
    sizes, times_us = np.array(points, float).T
    terms = np.stack([np.ones_like(sizes), sizes], axis=1) / times_us[:, None]
    solution, *_ = np.linalg.lstsq(terms, np.ones_like(times_us), rcond=None)
    return Constants(float(solution[0]), float(solution[1]))


def held_out_rows(machine: str | None = None) -> list[Row]:
    """Return the sizes that the fit did not see: every second one of each series."""
    rows = []
    for series in load_series(machine):
        line = fit(series["points"][::2])
        rows += [
            Row(series["system"], series["source"], size, time_us, line.message_us(size))
            for size, time_us in series["points"][1::2]
        ]
    return rows


def unfitted_rows(machine: str | None = None) -> list[Row]:
    """Return all sizes of the series whose machine ships with fastcoll, by its constants alone."""
    rows = []
    for series in load_series(machine):
        if not series["machine"]:
            continue
        cluster = Cluster(load_machine(series["machine"]))
        names = _NCCL if series["algorithm"] == "nccl" else (series["algorithm"],)
        for size, time_us in series["points"]:
            found = [priced("all_reduce", name, cluster, series["ranks"], size) for name in names]
            best_us = min(each.time_us for each in found if each.time_us is not None)
            rows.append(Row(series["system"], series["source"], size, time_us, best_us))
    return rows


def median_error(rows: Sequence[Row]) -> float:
    """Return the median of the absolute relative errors."""
    return float(np.median([abs(row.error) for row in rows]))
