# SPDX-License-Identifier: Apache-2.0
"""How long each file of tests takes, kept in pytest's cache for the next run's order.

Decides which file starts first. Left for the end, the longest would run alone.
"""

from collections import Counter

import pytest

KEY = "fastcoll/seconds"


class Durations:
    """Puts the files that took longest first; before them those of which nothing is known."""

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
            return self.before.get(file_of(item.nodeid), unknown_s)

        items.sort(key=expected_s, reverse=True)  # stable: a file stays together

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.now[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self.cache is not None and not self.is_worker and self.now:
            rounded = {file: round(seconds, 2) for file, seconds in self.now.items()}
            self.cache.set(KEY, self.before | rounded)


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]
