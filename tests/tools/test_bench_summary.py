# SPDX-License-Identifier: Apache-2.0
"""The page of results and the README's table agree with the result files."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.programs import load_script

ROOT = Path(__file__).parents[2]
FIRST = "xeon-amx-2core"  # the machine of the README's table


@pytest.fixture(scope="module")
def summary() -> ModuleType:
    return load_script(ROOT / "bench" / "summary.py")


def test_the_page_is_what_the_files_say(summary: ModuleType) -> None:
    assert (summary.RESULTS / "README.md").read_text() == summary.page(), (
        "run python bench/summary.py"
    )


def test_every_machine_is_on_the_page(summary: ModuleType) -> None:
    folders = {path.parent.name for path in summary.RESULTS.glob("*/*.json")}
    assert set(summary.MACHINES) == folders


def test_the_table_of_the_readme(summary: ModuleType) -> None:
    table = "\n".join(summary.first_screen(summary.Results(summary.RESULTS / FIRST)))
    assert table.count("\n| ") == 3
    assert table in (ROOT / "README.md").read_text(), table


def test_another_figure_is_another_page(summary: ModuleType, tmp_path: Path) -> None:
    """Change a figure of a file: the page must follow, which a page typed by hand would not."""
    path = summary.RESULTS / FIRST / "python-float32.json"
    document = json.loads(path.read_text())
    document["rows"][0]["ratios"]["gloo"]["median"] = 3.21
    document["rows"][0]["cells"][0]["time_us"] = 98.7
    (tmp_path / path.name).write_text(json.dumps(document))
    page = "\n".join(summary.all_reduce(summary.Results(tmp_path)))
    assert re.search(r"fastcoll from Python, us \| 98\.7 \|", page)
    assert re.search(r"Gloo, Python \| 3\.2x \|", page)
    assert "bfloat16" not in page, "no file, no row"


def test_what_was_not_measured_has_no_figure(summary: ModuleType, tmp_path: Path) -> None:
    document = {
        "rows": [
            {
                "size_bytes": 8,
                "ratios": {},
                "cells": [{"library": "fastcoll", "status": "wrong result"}],
            }
        ]
    }
    (tmp_path / "python-float32.json").write_text(json.dumps(document))
    assert list(summary.all_reduce(summary.Results(tmp_path))) == []


def test_cells_in_company_stand_by_way_and_size(summary: ModuleType, tmp_path: Path) -> None:
    rows = [
        {"situation": "alone", "way": "sync", "size_bytes": size, "gloo_over_fastcoll": ratio}
        for size, ratio in ((65536, 3.456), (8, 2.0))
    ]
    rows.append({"situation": "quota-50%", "way": "sync", "size_bytes": 8})
    document = {"rows": rows, "settings": {"sizes": [8, 65536]}}
    (tmp_path / "company.json").write_text(json.dumps(document))
    lines = list(summary._company(summary.Results(tmp_path)))
    assert lines[0] == "| steps/s over Gloo's, of 8 B, 64 KiB | sync |"
    assert lines[2:4] == ["| alone | 2.00, 3.46 |", "| quota-50% | not measured, not measured |"]
