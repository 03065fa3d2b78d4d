# SPDX-License-Identifier: Apache-2.0
"""The output of a run: figures of the windows, and a file that fits its schema."""

import copy
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import records

from fastcoll.measure.pattern import make_cell
from fastcoll.measure.results import (
    command_line,
    provenance,
    row_record,
    shorten,
    validate,
    write,
)
from fastcoll.measure.rounds import Outcome
from fastcoll.measure.timer import Budget, summarise, time_calls, time_calls_apart

Json = dict[str, Any]


def bench_file() -> Json:
    cell = make_cell("all_reduce", "float32", "sum", 1024, 2)
    own = Outcome("fastcoll", None, 0, 10, [[1.0, 2.0], [3.0, 2.5], [2.0, 2.0]])
    peer = Outcome("gloo", None, 0, 1, [[200.0, 180.0], [220.0, 100.0], [190.0, 210.0]])
    absent = Outcome("openmpi", "MPI has no bfloat16")
    fields = ("name", "status", "reason", "version", "command", "cpus")
    libraries = (
        ("fastcoll", "measured", None, "1", ["python"], [0, 1]),
        ("gloo", "measured", None, "2", ["python"], None),
        ("mpich", "not measured", "not installed", None, None, None),
    )
    return {
        "kind": "bench",
        **provenance(),
        "settings": {"world_size": 2},
        "libraries": [dict(zip(fields, row, strict=True)) for row in libraries],
        "rows": [row_record(cell, [own, peer, absent])],
        "one_way_flag_us": None,
    }


def demo_file() -> Json:
    phase = {"name": "fastcoll", "losses": [2.0, 1.0], "accuracy": 0.5, "communication_us": [1.0]}
    return {
        "kind": "demo",
        **provenance(),
        "settings": {"world_size": 2},
        "communication_ratio": 4.0,
        "checks": [{"what": "same bits", "passed": True}],
        "phases": [phase, phase | {"name": "gloo"}],
    }


def test_a_summary_takes_the_slowest_rank_of_each_window() -> None:
    summary = summarise([[1.0, 2.0], [3.0, 2.5], [2.0, 2.5]])
    assert summary.time_us == 2.5
    assert summary.best_us == 2.0
    assert summary.worst_us == 3.0
    assert summary.min_rank_us == 2.0
    assert summary.max_rank_us == 2.5
    assert summary.skew_us == 0.5
    assert summary.num_windows == 3


def test_a_window_is_filled_and_slow_calls_get_few_windows() -> None:
    budget = Budget(window_us=3000.0, min_windows=3, max_windows=21)
    assert budget.iterations(1.0) == 3000
    assert budget.iterations(200_000.0) == 1
    assert budget.windows(1.0) == 21
    assert budget.windows(200_000.0) == 3


def test_all_calls_are_made() -> None:
    seen: list[int] = []
    assert time_calls(seen.append, (7,), 5) > 0
    assert seen == [7] * 5


def test_the_time_before_a_call_is_not_the_calls() -> None:
    seen: list[str] = []

    def before() -> None:
        seen.append("before")
        time.sleep(0.02)

    assert 0 < time_calls_apart(seen.append, ("call",), 3, before) < 0.02
    assert seen == ["before", "call"] * 3


def test_a_row_says_how_many_times_slower_each_peer_is() -> None:
    [row] = bench_file()["rows"]
    assert row["ratios"] == {"gloo": {"median": 105.0, "best": 100.0}}
    cells = {cell["library"]: cell for cell in row["cells"]}
    assert cells["fastcoll"]["busbw_gbps"] == pytest.approx(1024 / 2.0 / 1e3)
    assert cells["openmpi"]["status"] == "not measured"
    assert cells["openmpi"]["reason"] == "MPI has no bfloat16"


@pytest.mark.parametrize("make", [bench_file, demo_file])
def test_a_file_fits_its_schema_and_reads_back(make: Any, tmp_path: Path) -> None:
    document = make()
    path = tmp_path / "new" / "result.json"
    write(document, path)
    read = json.loads(path.read_text())
    assert read == json.loads(json.dumps(document))
    validate(read)


BROKEN = {
    "no command": lambda doc: doc.pop("command"),
    "no machine": lambda doc: doc.pop("machine"),
    "unknown kind": lambda doc: doc.update(kind="other"),
    "another schema": lambda doc: doc.update(schema="fastcoll-result-2"),
    "time of zero": lambda doc: doc["rows"][0]["cells"][0].update(time_us=0),
    "no windows": lambda doc: doc["rows"][0]["cells"][0].pop("windows_us"),
    "no reason": lambda doc: doc["rows"][0]["cells"][2].update(reason=None),
    "no libraries": lambda doc: doc.update(libraries=[]),
    "negative #wrong": lambda doc: doc["rows"][0]["cells"][0].update(num_wrong=-1),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_does_not_fit_is_not_written(what: str, tmp_path: Path) -> None:
    document = copy.deepcopy(bench_file())
    BROKEN[what](document)
    with pytest.raises(jsonschema.ValidationError):
        write(document, tmp_path / "result.json")
    assert not (tmp_path / "result.json").exists()


def test_without_jsonschema_it_is_written_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    document = bench_file() | {"schema": "fastcoll-result-2"}
    write(document, tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text()) == document
    assert "not checked against its schema" in caplog.text


@pytest.mark.parametrize(
    ("argument", "short"),
    [
        ("/opt/x/bin/python3", "python3"),
        ("PREFIX=/opt/x/openmpi", "PREFIX=openmpi"),
        ('{"socket": "/run/a/b.sock", "n": 2}', '{"socket": "b.sock", "n": 2}'),
        ("bench/results/a.json", "bench/results/a.json"),
        ("../a.json", "../a.json"),
        ("8:256M:4", "8:256M:4"),
    ],
)
def test_no_absolute_path_reaches_a_file(argument: str, short: str) -> None:
    assert shorten(argument) == short


def test_a_command_can_be_typed_again() -> None:
    argv = ["/opt/venv/bin/fastcoll", "bench", "all_reduce", "--json", "/var/tmp/a.json"]
    assert command_line(argv) == "fastcoll bench all_reduce --json a.json"


@pytest.mark.slow
def test_recorded_results_fit_the_schema() -> None:
    folder = Path(__file__).parents[2] / "bench" / "results"
    for path in folder.glob("*/*.json"):
        document = json.loads(path.read_text())
        check = validate if document["kind"] in ("bench", "demo", "regret") else records.validate
        check(document)


def test_the_commands_and_the_programs_have_kinds_of_their_own() -> None:
    document = bench_file()
    with pytest.raises(jsonschema.ValidationError, match="'bench' is not one of"):
        records.validate(document)
    with pytest.raises(jsonschema.ValidationError, match="'memory' is not one of"):
        validate(document | {"kind": "memory"})
    records.validate(document | {"kind": "memory"})
