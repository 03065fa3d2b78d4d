# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: writes down the result of each test as soon as that is known.

`-p live_results --live-results FILE` appends one line of JSON when a test begins and one when it is
over. A test that FILE knows is not run again, also if it only began: a crash or a hang would
come again. The run ends when the device is lost, as all later tests would fail for that.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BEGUN = "begun"
DEVICE_IS_LOST = 70  # pytest's exit code; its own go up to 5


def read(path: Path) -> list[dict[str, Any]]:
    """Return the result of each test, in the order in which they began."""
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:  # it was stopped while it wrote
            continue
        rows[row["test"]] = row
    return list(rows.values())


class LiveResults:
    """A pytest plugin that writes the result of each test at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = {row["test"] for row in read(path)}
        self._reports: list[pytest.TestReport] = []

    def _write(self, test: str, result: str, text: str = "", seconds: float = 0.0) -> None:
        row = {"test": test, "result": result, "text": text, "seconds": round(seconds, 2)}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    @pytest.hookimpl(trylast=True)  # after the folders have deselected theirs
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        known = [item for item in items if item.nodeid in self._known]
        config.hook.pytest_deselected(items=known)
        items[:] = [item for item in items if item not in known]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports.clear()
        self._write(nodeid, BEGUN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        told = [one for one in self._reports if one.failed] or self._reports
        told = [one for one in told if one.outcome != "passed"] or told
        text = "" if told[0].passed else _reason(told[0])
        seconds = sum(one.duration for one in self._reports)
        self._write(nodeid, told[0].outcome, text, seconds)
        if told[0].failed and _device_is_lost():
            pytest.exit("the device is lost to this process", DEVICE_IS_LOST)


def _reason(report: pytest.TestReport) -> str:
    """Return the line that says most, of a skip or of an error."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    lines = [line.strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    # Errors of rank threads end with the rank's own error.
    own = [line for line in lines if "fastcoll" in line and "Error" in line] or lines
    return own[-1].removeprefix("E").strip()[:300] if own else report.longreprtext[-300:]


def _device_is_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--live-results", type=Path, help="where to write each test's outcome")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--live-results"):
        config.pluginmanager.register(LiveResults(path))
