# SPDX-License-Identifier: Apache-2.0
"""How long each file of tests takes, kept in pytest's cache for the next run's order.

Decides which file starts first. Left for the end, the longest would run alone. Decides also which
tests stay on one worker of xdist: those of a file, or of a build of the C++ programs.
"""

import importlib
import re
from collections import Counter
from typing import Any

import pytest

KEY = "fastcoll/seconds"
# The longest file. Its tests share nothing but the objects of a build.
BY_BUILD = "tests/protocol/native/test_native.py"


class Durations:
    """Puts those first that took longest; before them those of which nothing is known."""

    def __init__(self, config: pytest.Config) -> None:
        self.cache: pytest.Cache | None = getattr(config, "cache", None)
        self.is_worker = hasattr(config, "workerinput")
        self.before: dict[str, float] = self.cache.get(KEY, {}) if self.cache is not None else {}
        self.now: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)  # after the folders have set their marks
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        slow = {
            item.path
            for item in items
            if item.get_closest_marker("slow") or item.get_closest_marker("native")
        }

        def expected_s(item: pytest.Item) -> float:
            unknown_s = float("inf") if item.path in slow else 0.0
            return self.before.get(scope_of(item.nodeid), unknown_s)

        items.sort(key=expected_s, reverse=True)  # stable: a file stays together

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.now[scope_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self.cache is not None and not self.is_worker and self.now:
            rounded = {scope: round(seconds, 2) for scope, seconds in self.now.items()}
            self.cache.set(KEY, self.before | rounded)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        if config.getoption("dist") != "loadfile":
            return None
        scheduler = importlib.import_module("xdist.scheduler").LoadFileScheduling(config, log)
        scheduler._split_scope = scope_of
        return scheduler


def scope_of(nodeid: str) -> str:
    """Return the file of a test, with the build of a C++ program."""
    file, _, test = nodeid.partition("::")
    build = re.search(r"\[\w+-(\w+)", test) if file == BY_BUILD else None
    return f"{file}[{build[1]}]" if build else file
