# SPDX-License-Identifier: Apache-2.0
"""The cost model's constants from measured times.

Decides which constants fit best: non-negative, with the least sum of squared relative errors. Uses
the algorithms' own formulas, which are linear in the constants.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fastcoll.choose import algorithms
from fastcoll.choose.costs import Costs
from fastcoll.types import Request

_NAMES = tuple(field.name for field in fields(Costs))
_FORMULAS = {candidate.name: candidate.estimate_us for candidate in algorithms.ALL}


@dataclass(frozen=True)
class Point:
    """One measured time of a request by an algorithm."""

    request: Request
    algorithm: str
    time_us: float


@dataclass(frozen=True)
class Fit:
    """Constants, and the relative errors of the model's times with them."""

    costs: Costs
    median_error: float
    worst_error: float


def fit(points: Sequence[Point]) -> Fit | None:
    """Return the constants that fit the points best; None if there are too few to tell."""
    if len(points) < 2 * len(_NAMES):
        return None
    units = [Costs(*row) for row in np.eye(len(_NAMES)).tolist()]
    # Divided by the measured times: the residuals are relative errors.
    shares = np.array(
        [[_FORMULAS[p.algorithm](p.request, unit) / p.time_us for unit in units] for p in points]
    )
    values = _non_negative(shares)
    errors = np.abs(shares @ values - 1)
    return Fit(
        Costs(*(float(f"{value:.4g}") for value in values)),
        float(np.median(errors)),
        float(errors.max()),
    )


def _non_negative(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve `shares @ x = 1` by least squares with x >= 0: five unknowns, so all supports."""
    num_points, num_names = shares.shape
    target = np.ones(num_points)
    best, best_error = np.zeros(num_names), float(num_points)
    for size in range(1, num_names + 1):
        for support in combinations(range(num_names), size):
            part = shares[:, support]
            solution, *_ = np.linalg.lstsq(part, target, rcond=None)
            error = float(((part @ solution - target) ** 2).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(num_names), error
                best[list(support)] = solution
    return best
