# SPDX-License-Identifier: Apache-2.0
"""The model against published measurements: the score, and that no row is hidden."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from fastcoll.model.published import (
    fit,
    held_out_rows,
    load_series,
    median_error,
)

BENCH = Path(__file__).parents[2] / "bench"


def bench_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_scores", BENCH / "model_scores.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sizes_that_the_fit_did_not_see_are_predicted() -> None:
    rows = held_out_rows()
    assert median_error(rows) <= 0.15
    assert len(rows) == sum(len(series["points"]) // 2 for series in load_series())


def test_the_score_would_notice_a_model_that_knows_nothing() -> None:
    """The negative control: predicting each series by its mean misses by far."""
    errors = []
    for series in load_series():
        times = [time_us for _, time_us in series["points"]]
        mean = sum(times) / len(times)
        errors += [abs(mean / time_us - 1) for time_us in times[1::2]]
    assert sorted(errors)[len(errors) // 2] > 0.3


def test_the_fit_finds_the_line() -> None:
    found = fit([(0, 5.0), (1000, 6.0), (4000, 9.0)])
    assert (found.alpha_us, found.beta_us_per_byte) == (pytest.approx(5), pytest.approx(1e-3))


def test_every_series_says_where_it_is_from() -> None:
    for series in load_series():
        assert series["source"].startswith("github.com/")
        sizes = [size for size, _ in series["points"]]
        assert sizes == sorted(set(sizes))
        assert len(sizes) >= 4


def test_the_committed_scores_are_those_of_the_code() -> None:
    committed = (BENCH / "results" / "model" / "published.md").read_text()
    assert committed == bench_script().report()
