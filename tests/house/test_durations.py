# SPDX-License-Identifier: Apache-2.0
"""The order in which files of tests start, and the durations that a run keeps for it."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.durations import BY_BUILD, COMPUTING, Durations, scope_of
from tests.support.programs import run_python

ROOT = Path(__file__).parents[2]


class Cache(dict[str, Any]):
    """pytest's cache, in memory."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value


def item(file: str, test: str, *marks: str) -> SimpleNamespace:
    return SimpleNamespace(
        nodeid=f"{file}::{test}",
        path=Path("/tests", file),
        get_closest_marker=lambda name: name in marks or None,
    )


def order(cache: Cache | None) -> list[str]:
    """Return the order in which a run with this cache begins its tests."""
    items = [
        item("quick.py", "a"),
        item("half.py", "a"),
        item("half.py", "b", "slow"),
        item("native.py", "a", "native"),
        item("new.py", "a"),
    ]
    Durations(SimpleNamespace(cache=cache)).pytest_collection_modifyitems(items)
    return [each.nodeid for each in items]


def run(cache: Cache, seconds: dict[str, list[float]], **config: Any) -> None:
    durations = Durations(SimpleNamespace(cache=cache, **config))
    for file, parts in seconds.items():
        for part in parts:
            report = SimpleNamespace(nodeid=f"{file}::a", duration=part)
            durations.pytest_runtest_logreport(report)
    durations.pytest_sessionfinish()


def test_without_a_run_before_slow_files_start_first() -> None:
    for cache in (None, Cache()):
        assert order(cache) == [
            "half.py::a",
            "half.py::b",
            "native.py::a",
            "quick.py::a",
            "new.py::a",
        ]


def test_the_file_that_took_longest_starts_first() -> None:
    cache = Cache()
    run(cache, {"quick.py": [2, 1], "half.py": [2], "native.py": [1]})
    assert order(cache) == ["quick.py::a", "half.py::a", "half.py::b", "native.py::a", "new.py::a"]


def test_a_part_of_the_files_leaves_what_is_known_of_others() -> None:
    cache = Cache()
    run(cache, {"quick.py": [4], "half.py": [2], "native.py": [1]})
    run(cache, {"native.py": [5]})
    run(cache, {"half.py": [9]}, workerinput={})  # the controller tells
    assert order(cache)[:3] == ["native.py::a", "quick.py::a", "half.py::a"]


def test_each_build_of_the_programs_is_apart() -> None:
    tests = ["test_native[test_p2p-thread-relaxed_release_of_sent]", "test_native[test_ends-plain]"]
    scopes = [scope_of(f"{BY_BUILD}::{test}") for test in [*tests, "test_every_case"]]
    assert scopes == [f"{BY_BUILD}[thread]", f"{BY_BUILD}[plain]", BY_BUILD]
    assert (ROOT / BY_BUILD).exists()
    assert scope_of("tests/unit/test_a.py::test_b[c-d]") == "tests/unit/test_a.py"


# A project's plugin, and the file of its tests: one with a worker's niceness above its own.
PLUGIN = """
from tests.durations import Durations

def pytest_configure(config):
    config.pluginmanager.register(Durations(config))
"""
NICENESS = """
import os

def test_niceness():
    assert os.nice(0) == {niceness}
"""


def test_one_worker_computes_and_the_other_has_ranks(tmp_path: Path) -> None:
    pytest.importorskip("xdist")  # a machine with a GPU may lack it
    (tmp_path / "plugin.py").write_text(PLUGIN)
    for folder, niceness in (("contract", os.nice(0)), ("unit", min(os.nice(0) + 5, 19))):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        for name in ("a", "b"):
            path = tmp_path / "tests" / folder / f"test_{folder}_{name}.py"
            path.write_text(NICENESS.format(niceness=niceness))
    words = ["-m", "pytest", "-v", "-p", "plugin", "-n", "2", "--dist", "loadfile"]
    words += ["--no-loadscope-reorder", "--rootdir", str(tmp_path)]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run_python(*words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout
    ran = set(re.findall(r"\[(gw\d)\].* PASSED tests/(\w+)/", done.stdout))
    assert ran == {("gw0", "unit"), ("gw1", "contract")}, done.stdout


def test_folders_that_compute_are_there() -> None:
    assert all((ROOT / "tests" / folder).is_dir() for folder in COMPUTING)
