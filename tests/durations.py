# SPDX-License-Identifier: Apache-2.0
"""How long each file of tests takes, kept in pytest's cache for the next run's order.

Decides which file starts first. Left for the end, the longest would run alone. Decides also which
tests stay on one worker of xdist: those of a file, or of a build of the C++ programs.

The first worker begins with the files that compute: compilers, model checkers, and their programs.
It has a lower priority, so ranks that wake each other find a CPU. The values of all verbs took 32 s
alone, and 253 s in a run of three workers of one priority.
"""

import importlib
import os
import re
from collections import Counter
from typing import Any

import pytest

KEY = "fastcoll/seconds"
# The longest file. Its tests share nothing but the objects of a build.
BY_BUILD = "tests/protocol/native/test_native.py"
COMPUTING = ("gpu_host", "house", "model", "protocol", "tools", "triton", "unit")  # folders
FIRST_WORKER = "gw0"


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
        return make_scheduler(config, log)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        # Compilers leave the CPU to ranks that wake up for each other.
        worker = getattr(session.config, "workerinput", {})
        if worker.get("workerid") == FIRST_WORKER:
            os.nice(5)


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return xdist's scheduler by file, which gives each worker files of its kind first."""
    by_file = importlib.import_module("xdist.scheduler").LoadFileScheduling

    class ByKind(by_file):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            is_first = node.gateway.id == FIRST_WORKER
            for scope in self.workqueue:
                if is_computing(scope) == is_first:
                    self.workqueue.move_to_end(scope, last=False)
                    break
            super()._assign_work_unit(node)

    return ByKind(config, log)


def is_computing(scope: str) -> bool:
    """Return whether a file's tests compute, or else wait for ranks."""
    return scope.startswith(tuple(f"tests/{folder}/" for folder in COMPUTING))


def scope_of(nodeid: str) -> str:
    """Return the file of a test, with the build of a C++ program."""
    file, _, test = nodeid.partition("::")
    build = re.search(r"\[\w+-(\w+)", test) if file == BY_BUILD else None
    return f"{file}[{build[1]}]" if build else file
