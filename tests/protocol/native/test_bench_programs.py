# SPDX-License-Identifier: Apache-2.0
"""The C++ programs of bench/ compile, run, and are read right; their figures are not tested."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.proofs import CPP
from tests.support.programs import load_script, need

BENCH = Path(__file__).parents[3] / "bench"
SCRIPT = BENCH / "checks_cost.py"


def test_the_median_difference_and_its_interval() -> None:
    script = runpy.run_path(str(SCRIPT))
    rows = [(110.0 + noise, 100.0 + noise, 111.0 + noise) for noise in range(101)]
    found = script["report"](rows)
    assert found["extra_ns"] == 10
    assert found["extra_ns_interval"] == (10, 10)
    assert found["checked_ns"] == 160
    assert found["chance_ns"] == -1
    assert found["reached"]  # 10 ns
    assert not script["report"]([(130.0 + noise, 100.0, 130.0) for noise in range(3)])["reached"]
    assert not script["report"]([(110.0 + noise, 100.0, 101.0) for noise in range(3)])["reached"]
    low, high = script["interval"]([float(number) for number in range(400)])
    assert low < 200 < high
    assert 30 < high - low < 50


@pytest.mark.proof(*CPP, "bench")
@pytest.mark.native
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("g++")
    arguments = ["checks_cost.py", str(tmp_path), "--windows", "4", "--calls", "50"]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result = json.loads((tmp_path / "checks.json").read_text())
    assert result["num_windows"] == 4
    assert min(result["checked_ns"], result["unchecked_ns"]) > 10


@pytest.mark.proof(*CPP, "bench")
@pytest.mark.native
def test_memory_is_read() -> None:
    need("g++")
    found = load_script(BENCH / "memory_floor.py").measure([1 << 16, 1 << 22], 5)
    assert set(found) == {str(1 << 16), str(1 << 22)}
    assert min(found.values()) > 0
