# SPDX-License-Identifier: Apache-2.0
"""How time is taken and summed up: windows of back-to-back calls, the slowest rank of each.

Decides how many calls make a window and how many windows are taken. Knows no library.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Budget:
    """How long to look."""

    # Length of one window; long against the clock and the barrier before it, short against the
    # disturbances of a shared machine.
    window_us: float = 3000.0
    min_windows: int = 3  # windows per round; slow calls get few, fast ones many
    max_windows: int = 21
    num_rounds: int = 4  # times each library has its turn

    def iterations(self, call_us: float) -> int:
        """Return how many calls of `call_us` fill one window (at least one)."""
        return max(1, min(1_000_000, round(self.window_us / max(call_us, 1e-3))))

    def windows(self, call_us: float) -> int:
        """Return how many windows a round takes: as many as 64 ms hold, within the limits."""
        window_us = call_us * self.iterations(call_us)
        return max(self.min_windows, min(self.max_windows, int(64_000 / max(window_us, 1e-3))))


@dataclass(frozen=True)
class Summary:
    """One library at one size, in microseconds per call.

    `time_us` is the median over the windows of the slowest rank, `best_us` the least such window.
    `min_rank_us` and `max_rank_us` are the medians of the fastest and the slowest rank, `skew_us`
    the median of their difference.
    """

    time_us: float
    best_us: float
    p10_us: float
    p90_us: float
    worst_us: float
    min_rank_us: float
    max_rank_us: float
    skew_us: float
    num_windows: int


def time_calls(fn: Callable[..., Any], args: tuple[Any, ...], iterations: int) -> float:
    """Return the seconds that `iterations` back-to-back calls of `fn(*args)` take."""
    begin = perf_counter()
    for _ in repeat(None, iterations):
        fn(*args)
    return perf_counter() - begin


def time_calls_apart(
    fn: Callable[..., Any], args: tuple[Any, ...], iterations: int, before: Callable[[], Any]
) -> float:
    """Return the seconds that `iterations` calls of `fn(*args)` take, each after `before()`."""
    total = 0.0
    for _ in repeat(None, iterations):
        before()
        begin = perf_counter()
        fn(*args)
        total += perf_counter() - begin
    return total


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the sorted values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median: two of the sorted values, for any distribution.

    The number of values below the median is binomial; its normal approximation is a little wide
    for few values. Up to five values say nothing narrower than their range.
    """
    ordered = sorted(values)
    half_width = 0.98 * math.sqrt(len(ordered))
    low = max(0, math.floor(len(ordered) / 2 - half_width))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half_width) - 1)
    return ordered[low], ordered[high]


def rounds_interval(values: Sequence[float], num_rounds: int) -> tuple[float, float]:
    """Return the 95 % interval of the median of values that were taken in rounds of equal length.

    It is the interval of the rounds' medians. The values of one round were taken in one state of
    the machine. So many of them say no more about the next state than one does.
    """
    length = max(1, len(values) // num_rounds)
    rounds = [values[begin : begin + length] for begin in range(0, len(values), length)]
    return median_interval([statistics.median(one) for one in rounds])


def summarise(windows_us: Sequence[Sequence[float]]) -> Summary:
    """Sum up `windows_us[window][rank]`, the time of one call on each rank in each window."""
    slowest = [max(window) for window in windows_us]
    fastest = [min(window) for window in windows_us]
    return Summary(
        time_us=statistics.median(slowest),
        best_us=min(slowest),
        p10_us=percentile(slowest, 0.1),
        p90_us=percentile(slowest, 0.9),
        worst_us=max(slowest),
        min_rank_us=statistics.median(fastest),
        max_rank_us=statistics.median(slowest),
        skew_us=statistics.median(s - f for s, f in zip(slowest, fastest, strict=True)),
        num_windows=len(slowest),
    )
