# SPDX-License-Identifier: Apache-2.0
"""The model against published measurements: the score, and that no row is hidden."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll_model.errors import ModelError
from fastcoll_model.published import (
    _DATA,
    fit,
    held_out_rows,
    load_series,
    median_error,
    read_series,
)
from tests.support.damage import damaged
from tests.support.programs import load_script

BENCH = Path(__file__).parents[2] / "bench"


def test_sizes_that_the_fit_did_not_see_are_predicted() -> None:
    rows = held_out_rows()
    assert median_error(rows) <= 0.15
    assert len(rows) == sum(len(series["points"]) // 2 for series in load_series())


def test_the_score_would_notice_a_model_that_knows_nothing() -> None:
    """Predict each series by its mean: the score must be far worse."""
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
    assert all(series["source"].startswith("github.com/") for series in load_series())


def changed(**fields: Any) -> dict[str, Any]:
    document = json.loads(_DATA.read_text())
    document["series"][0] |= fields
    return document


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([], "the top: .* is not of type"),
        (changed(source=""), "series/0/source.*: say where"),
        (changed(points=[[8, 1.0]]), "series/0/points.*: write four"),
        (changed(points=[[8, 1], [16, 0], [32, 1], [64, 1]]), "points/1/1.*: write microseconds"),
        (changed(points=[[8, 1], [8, 1], [32, 1], [64, 1]]), "points: put the sizes in ascending"),
        (changed(machine="hal"), "machine: no machine 'hal'; there are .*dgx-1v"),
        (changed(algorithm="magic"), "algorithm: no algorithm 'magic'"),
    ],
)
def test_a_wrong_file_is_refused_where_it_is_wrong(document, text: str, tmp_path: Path) -> None:
    path = tmp_path / "published.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=rf"published\.json: at .*{text}"):
        read_series(path)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(tmp_path_factory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_text(json.dumps(damaged(data, changed())))
    try:
        for series in read_series(path):
            fit(series["points"])
    except ModelError as error:
        assert "damaged.json" in str(error)


@pytest.mark.slow
def test_the_committed_scores_are_those_of_the_code() -> None:
    committed = (BENCH / "results" / "model" / "published.md").read_text()
    assert committed == load_script(BENCH / "model_scores.py").report()
