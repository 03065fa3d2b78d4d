# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/check.sh without a GPU: it says so; and its report calls a skip a skip."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_host.gpu_measured import GPU, MEASURED
from tests.support.programs import run

LIMIT_S = 240.0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="not run: there is a GPU here")
def test_without_a_gpu_it_ends_cleanly_and_claims_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable}
    done = run([GPU / "check.sh", "-o", tmp_path / "out"], LIMIT_S, env=env)
    assert done.returncode == 77, done.stdout
    assert "no GPU" in done.stdout
    assert "Nothing was built, run or measured" in done.stdout
    assert not (tmp_path / "out").exists()


STEPS = """build\t0\t66
tests\t1\t100
compute-sanitizer\tskip\t0
measure\t124\t150
kernels\tlate\t0
"""
TESTS = [
    ("tests/gpu/test_smoke.py::test_all_reduce[8-ring]", "passed", ""),
    ("a.py::test_bad", "failed", "RuntimeError: x"),
    ("a.py::test_none", "skipped", "no second GPU"),
    ("a.py::test_hung", "begun", ""),
]
LINES = [json.dumps(dict(zip(("test", "result", "text"), row, strict=True))) for row in TESTS]


def test_the_report_counts_what_passed_and_names_the_rest(
    tmp_path: Path, report: Callable[[Path], str]
) -> None:
    (tmp_path / "steps.tsv").write_text(STEPS)
    rows = "".join(line[:-1] + ', "seconds": 1}\n' for line in LINES)
    (tmp_path / "tests-smoke.jsonl").write_text(rows + rows[:30])  # stopped while it wrote
    (tmp_path / "measured.json").write_text(json.dumps(MEASURED))
    (tmp_path / "kernels.json").write_text(json.dumps(MEASURED)[:40])
    text = report(tmp_path)
    for line in (
        "1 passed, 2 failed, 1 skipped",
        "works with 8 ranks: ring",
        "failed: tests-smoke: a.py::test_bad: RuntimeError: x",
        "failed: tests-smoke: a.py::test_hung: crashed, or hung to the limit",
        "skipped: tests-smoke: a.py::test_none: no second GPU",
        "skipped: not there",
        "not run: out of time",
        "stopped: out of time",
        "left out: 1",
        "not all measured: measure (stopped: out of time; 4 rows)",
        "not measured: kernels (not run: out of time)",
        "not measured: fused (not run)",
        "5.00 (50%)",
    ):
        assert line in text
    document = json.loads((tmp_path / "out/gpu.json").read_text())
    assert document["gpus"][0]["name"] == "Some GPU"
    assert "uuid" not in document["gpus"][0]
    assert document["measured"] == MEASURED
    assert {"commit", "driver", "versions", "machine", "date", "command"} <= document.keys()
    assert (tmp_path / "out/gpu.png").stat().st_size > 1000
    assert "two_shot" in (tmp_path / "out/gpu.txt").read_text()


def test_the_report_is_a_page_whatever_happened(
    tmp_path: Path, report: Callable[[Path], str]
) -> None:
    rows = [{"test": f"a.py::test_{i}", "result": "failed", "text": "x" * 300} for i in range(500)]
    (tmp_path / "tests-exact.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = report(tmp_path)
    assert "500 failed" in text
    assert "488 more, see gpu.json" in text
    assert len(text) < 8000
    assert len(json.loads((tmp_path / "out/gpu.json").read_text())["tests"]["failed"]) == 500


def beside(*times_us: float | None, reason: str | None = None) -> Any:
    """A record of `fastcoll bench`: fastcoll's times at sizes, and a library that is not there."""
    cells = [
        {"library": "fastcoll", "reason": None, "time_us": time_us}
        if time_us is not None
        else {"library": "fastcoll", "reason": reason}
        for time_us in times_us
    ]
    return {
        "settings": {"world_size": 2},
        "libraries": [
            {"name": "fastcoll", "reason": None},
            {"name": "cupy", "reason": "CuPy is not installed"},
        ],
        "rows": [{"size_bytes": 8 << 10 * i, "cells": [cell]} for i, cell in enumerate(cells)],
    }


def test_the_report_sets_the_libraries_side_by_side(
    tmp_path: Path, report: Callable[[Path], str]
) -> None:
    (tmp_path / "steps.tsv").write_text("carrier-1\t0\t20\ncarrier-2\tskip\t0\nversus\t1\t90\n")
    (tmp_path / "carrier-1.json").write_text(json.dumps(beside(3.5, 4.25)))
    (tmp_path / "versus.json").write_text(json.dumps(beside(None, 4.5, reason="wrong result: 1")))
    text = report(tmp_path)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "fastcoll 3.50 4.25" in lines
    assert "fastcoll - 4.50 not measured: wrong result: 1" in lines
    assert lines.count("cupy not measured: CuPy is not installed") == 2
    assert "carrier-1: us of all_reduce, 2 ranks" in text
    assert "not measured: carrier-2 (skipped: not there)" in text
    document = json.loads((tmp_path / "out/gpu.json").read_text())
    assert document["carrier_1"]["rows"][1]["size_bytes"] == 8192
    assert document["carrier_2"] is None
    assert "4.50" in (tmp_path / "out/gpu.txt").read_text()


def test_a_run_that_broke_off_passes_nothing(tmp_path: Path, report: Callable[[Path], str]) -> None:
    (tmp_path / "steps.tsv").write_text("build\t0\t66\ntests\t139\t3\n")
    text = report(tmp_path)
    assert "failed (139)" in text
    assert "0 passed" in text
    assert "not measured: measure (not run)" in text


@pytest.mark.slow
def test_what_a_gpu_machine_needs_is_there_without_the_rest() -> None:
    """The machines that GPUs are on have torch and NumPy, and not all that a desktop has."""
    program = (
        "import sys\n"
        "sys.path[:0] = ['../..', '../../scripts']\n"
        "for name in ('jsonschema', 'matplotlib', 'hypothesis', 'psutil', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "import measure, kernels, report, run_tests, fastcoll.cli\n"
        "import tests.conftest, tests.contract.test_values, tests.gpu.test_exact\n"
    )
    done = run([sys.executable, "-c", program], LIMIT_S, cwd=GPU)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("argument", ["bulid", "--msp", "-o"])
def test_a_wrong_argument_is_refused(argument: str) -> None:
    done = run([GPU / "check.sh", argument], LIMIT_S)
    assert done.returncode not in (0, 77)
    assert argument in done.stdout


# ---- what happens to the rest when something goes wrong ------------------------------------------

BAD_TESTS = """
import os, sys, time, types, pytest
def test_a(): pass
def test_crash(): os._exit(134)
def test_fail(): raise RuntimeError("no good")
def test_hang(): time.sleep(600)
def test_lose():
    def synchronize(): raise RuntimeError("an illegal memory access was encountered")
    cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
    synchronize()
@pytest.mark.skip(reason="not here")
def test_skip(): pass
def test_z(): assert "torch" not in sys.modules, "in a new process"
"""


@pytest.mark.slow  # one hangs
def test_every_test_runs_whatever_the_others_do(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(BAD_TESTS)
    (tmp_path / "pytest.ini").touch()
    results = tmp_path / "results.jsonl"
    command = [sys.executable, GPU / "run_tests.py", results, "150", "12", "-q", "test_bad.py"]
    env = {**os.environ, "PYTHONPATH": str(GPU)}
    done = run(command, LIMIT_S, cwd=tmp_path, env=env)
    assert done.returncode == 1, done.stdout
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    found = {row["test"].split("::")[1]: (row["result"], row["text"]) for row in rows}
    assert found == {
        "test_a": ("passed", ""),
        "test_crash": ("begun", ""),
        "test_fail": ("failed", "RuntimeError: no good"),
        "test_hang": ("begun", ""),
        "test_lose": ("failed", "RuntimeError: an illegal memory access was encountered"),
        "test_skip": ("skipped", "Skipped: not here"),
        "test_z": ("passed", ""),
    }


FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
  *is_available*) echo 1 90 ;;
  *"pip install"*) mkdir -p "{work}/site/fastcoll" ;;
  *run_tests.py*test_exact*)
    echo '{{"test": "e.py::test_hung", "result": "begun"}}' >"$2"
    trap '' TERM
    sleep 60
    ;;
  *run_tests.py*) echo '{{"test": "t.py::test_ok", "result": "passed", "seconds": 1}}' >"$2" ;;
  *report.py*) exec "{python}" "$@" ;;
  *) exit 3 ;;
esac
"""


@pytest.mark.slow  # one hangs
@pytest.mark.parametrize("limit", ["all", "stage"])
def test_every_step_is_tried_and_the_report_comes_in_time(tmp_path: Path, limit: str) -> None:
    """check.sh itself: a step that hangs to its death, others that fail, a limit for them."""
    work = tmp_path / "build/gpu-check"
    (tmp_path / "bench/gpu").mkdir(parents=True)
    for name in ("check.sh", "report.py", "live_results.py"):
        shutil.copy(GPU / name, tmp_path / "bench/gpu" / name)
    limit_s = 38
    shorter = {"\nkill_s=10 ": "\nkill_s=2 ", "\nreport_s=30 ": "\nreport_s=20 "}
    shorter[" least_s=10 "] = " least_s=3 "
    more = ["--within", str(limit_s)]
    if limit == "stage":  # which is otherwise 9 minutes
        shorter["stage_s=$((540 "], more = f"stage_s=$(({limit_s} ", []
    script = tmp_path / "bench/gpu/check.sh"
    for there, instead in shorter.items():
        assert there in script.read_text()
        script.write_text(script.read_text().replace(there, instead))
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.format(work=work, python=sys.executable))
    python.chmod(0o755)
    out = tmp_path / "out"
    begin = time.monotonic()
    command = [tmp_path / "bench/gpu/check.sh", *more, "--commit", "abc", "-o", out]
    done = run(command, LIMIT_S, env={**os.environ, "PYTHON": str(python)})
    assert time.monotonic() - begin < limit_s
    assert done.returncode == 1, done.stdout
    document = json.loads((out / "gpu.json").read_text())
    results = {row["step"]: row["result"] for row in document["steps"]}
    assert results["build"] == results["smoke"] == "passed"
    assert results["exact"] == "stopped: out of time"
    assert results["graphs"] == "not run: out of time"
    # Stages have a time each, all of them together have one if that is asked for.
    assert results["measure"] == ("not run: out of time" if limit == "all" else "failed (3)")
    assert results["carrier-1"] == results["measure"]
    assert f"not measured: measure ({results['measure']})" in done.stdout
    assert document["commit"] == "abc"
    assert "test_hung: crashed, or hung to the limit" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("written: ")
