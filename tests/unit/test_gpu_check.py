# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/check.sh without a GPU: it says so; and its report calls a skip a skip."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastcoll.topology import gpu

ROOT = Path(__file__).parents[2]
GPU = ROOT / "bench/gpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="not run: there is a GPU here")
def test_without_a_gpu_it_ends_cleanly_and_claims_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [GPU / "check.sh", tmp_path / "out"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 77, done.stderr
    assert "no GPU" in done.stdout
    assert "Nothing was built, run or measured" in done.stdout
    assert not (tmp_path / "out").exists()


STEPS = """build\t0\t66
tests\t1\t100
compute-sanitizer\tskip\t0
measure\t124\t150
"""
TESTS = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure message="x"/></testcase>
<testcase classname="a" name="none"><skipped message="no second GPU"/></testcase>
</testsuite></testsuites>"""
MEASURED = {
    "copy_gbps": 4000.0,
    "num_gpus": 1,
    "left_out": [[8, "auto", 8, "eager"]],
    "rows": [
        {
            "ranks": 2,
            "algorithm": algorithm,
            "mode": "graph",
            "size_bytes": size,
            "time_us": 5.0,
            "fraction_of_copy": 0.5,
        }
        for algorithm in ("auto", "two_shot")
        for size in (8, 1024)
    ],
}


@pytest.fixture
def report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path], str]:
    """`report(folder)` is what the report on a folder prints; its files go to folder/out."""
    monkeypatch.syspath_prepend(str(GPU))
    module = importlib.import_module("report")
    one = gpu.Gpu(0, "Some GPU", "id", "0", 90, 132, 1, 1, True, True)
    monkeypatch.setattr(gpu, "gpus", lambda: [one])

    def run(folder: Path) -> str:
        module.main(folder, folder / "out")
        return capsys.readouterr().out

    return run


def test_the_report_counts_what_passed_and_names_the_rest(
    tmp_path: Path, report: Callable[[Path], str]
) -> None:
    (tmp_path / "steps.tsv").write_text(STEPS)
    (tmp_path / "tests.xml").write_text(TESTS)
    (tmp_path / "measured.json").write_text(json.dumps(MEASURED))
    text = report(tmp_path)
    for line in (
        "1 passed, 1 failed, 1 skipped",
        "a::bad",
        "a::none: no second GPU",
        "skipped: not installed",
        "stopped: out of time",
        "not measured, out of time: 1 rows",
    ):
        assert line in text
    document = json.loads((tmp_path / "out/gpu.json").read_text())
    assert document["gpus"][0]["name"] == "Some GPU"
    assert "uuid" not in document["gpus"][0]
    assert document["measured"] == MEASURED
    assert {"commit", "driver", "versions", "machine", "date", "command"} <= document.keys()
    assert (tmp_path / "out/gpu.png").stat().st_size > 1000


def test_a_run_that_broke_off_passes_nothing(tmp_path: Path, report: Callable[[Path], str]) -> None:
    (tmp_path / "steps.tsv").write_text("build\t0\t66\ntests\t139\t3\n")
    text = report(tmp_path)
    assert "failed (139)" in text
    assert "0 passed" in text
    assert "nothing was measured" in text
