# SPDX-License-Identifier: Apache-2.0
"""Proofs that depend on files alone: not repeated while the files are those of a green run.

Decides which tests are proofs, on which files and tools they depend, and when a result is kept in
pytest's cache. A slow test of the library's promises is one without a mark. Only --skip-proved
leaves out a test; without it every run repeats all.
"""

import ast
import datetime
import functools
import hashlib
import inspect
import operator
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

OPTION = "--skip-proved"
CPP = ("csrc", "kernels")
LIBRARY = (*CPP, "python")
# The rooms on top of the library, which no other one imports (pyproject.toml). Their modules count
# only for tests that import them, or run the command line.
TOP = ("fastcoll/cli/", "fastcoll/measure/", "fastcoll/__main__.py")
COMMAND = '"-m", "fastcoll"'
# The sources of the CUDA kernels and of their simulator.
KERNELS = ("kernels", "csrc/sim", "csrc/dtypes.h", "csrc/cpu/convert.h", "csrc/cpu/reduce_ops.inc")
ALWAYS = ("tests/conftest.py", "tests/proofs.py", "constraints.txt", "pyproject.toml", "setup.py")
# Where the modules lie that are inputs of the tests that import them: packages, and folders on the
# tests' path (pyproject.toml).
PACKAGES = ("tests", "scripts", "bench")
FOLDERS = ("bench", "bench/gpu", "scripts")
TOOLS = ("g++", "clang++", "aarch64-linux-gnu-g++", "qemu-aarch64", "nvcc", "ptxas", "spin -V")
RELACY = Path("/usr/include/relacy")
# Folders whose slow tests depend on the library and on tests, unless a mark says otherwise.
OF_LIBRARY = ("contract", "faults", "jax", "nodes", "torch", "unit")
FAKES = "tests/support/fake*"
DIGEST = pytest.StashKey[str]()


@functools.cache
def versions() -> bytes:
    """Return what the tools and the system say of themselves."""
    said = f"{platform.platform()} Python {platform.python_version()}".encode()
    for tool in TOOLS:
        name, *option = tool.split()
        if shutil.which(name):
            command = [name, *(option or ["--version"])]
            said += subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout
    for header in sorted(RELACY.rglob("*.hpp")):
        said += header.read_bytes()
    return said


def digest_of(root: Path, inputs: Iterable[str]) -> str:
    """Return a hash of the names and bytes of all files below `inputs`, and of the tools."""
    digest = hashlib.sha256(versions())
    for pattern in inputs:
        places = sorted(root.glob(pattern))
        assert places, f"no file is called {pattern}"
        for place in places:
            left_out = tuple(f"{place}/{name}" for name in TOP)
            for path, stat in files_below(place):
                if path.endswith(".py") and path.startswith(left_out):
                    continue
                content = hash_file(path, stat.st_mtime_ns, stat.st_size)
                digest.update(f"{path[len(str(root)) :]} {content}\n".encode())
    return digest.hexdigest()[:16]


def files_below(place: Path | os.DirEntry[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each file with its time and size. Pathlib's rglob would take three times as long."""
    if place.is_dir():
        with os.scandir(place) as entries:
            for entry in sorted(entries, key=operator.attrgetter("name")):
                yield from files_below(entry)
    elif place.is_file() and not place.name.endswith(".pyc"):
        yield os.fspath(place), place.stat()


@functools.cache
def hash_file(path: str, _mtime_ns: int, _size: int) -> str:
    """Return a hash of a file's bytes, read again only if the file has changed."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def named_inputs(item: pytest.Item) -> tuple[str, ...]:
    """Return the files that a proof names, or that stand for it; of other tests none."""
    if mark := item.get_closest_marker("proof"):
        return mark.args
    is_slow = item.get_closest_marker("slow") or item.get_closest_marker("native")
    return (*LIBRARY, FAKES) if is_slow and item.path.parent.name in OF_LIBRARY else ()


def inputs_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the files and folders that a proof depends on.

    It names some. Its own folder counts, where its programs lie, but for the folder's other tests.
    So do the modules that the folder and its fixtures import of the tests.
    """
    root = item.config.rootpath
    beside = item.path.parent.iterdir()
    own = {path for path in beside if path == item.path or not is_test_or_cache(path)}
    files = {path for path in own if path.suffix == ".py"} | files_of_fixtures(item)
    modules = own.union(*(imports_of(file, root) for file in files))
    names = (str(file.relative_to(root)) for file in sorted(modules))
    return (*named_inputs(item), *names, *ALWAYS)


def is_test_or_cache(path: Path) -> bool:
    return path.name == "__pycache__" or (path.suffix == ".py" and path.stem.startswith("test_"))


def files_of_fixtures(item: pytest.Item) -> set[Path]:
    """Return the files of this repository that define a test's fixtures."""
    found = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
    files = {Path(inspect.getfile(one.func)) for fixtures in found for one in fixtures}
    return {file for file in files if file.is_relative_to(item.config.rootpath / "tests")}


@functools.cache
def imports_of(path: Path, root: Path) -> frozenset[Path]:
    """Return the modules of this repository that a file imports, and those import in turn."""
    found: set[Path] = set()
    todo = [path]
    while todo:
        new = modules_in(todo.pop(), root) - found
        found |= new
        todo += new
    return frozenset(found)


def modules_in(path: Path, root: Path) -> set[Path]:
    text = path.read_text()
    names = {"fastcoll.__main__"} if COMMAND in text else set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    stems = {name.replace(".", "/") for name in names}
    paths = {f"{stem}.py" for stem in stems} | {f"{stem}/__init__.py" for stem in stems}
    files = {root / path for path in paths if path.split("/")[0] in PACKAGES}
    files |= {root / "python" / path for path in paths if path.startswith(TOP)}
    files |= {root / folder / path for folder in FOLDERS for path in paths}
    return {file for file in files if file.exists()}


class Proofs:
    """Skips what is proved, and keeps what passed."""

    def __init__(self, config: pytest.Config) -> None:
        cache: pytest.Cache | None = getattr(config, "cache", None)
        self.cache = cache if config.getoption(OPTION) else None

    @pytest.hookimpl(tryfirst=True)  # before fixtures, which compile
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if not self.cache or not named_inputs(item):
            return
        digest = digest_of(item.config.rootpath, inputs_of(item))
        known = self.cache.get(key_of(item), {})
        if known.get("digest") == digest:
            text = f"proved by {digest} on {known['date']}"
            item.user_properties.append(("proved", text))
            pytest.skip(text)
        item.stash[DIGEST] = digest

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        if not report.passed:
            item.stash[DIGEST] = ""
        elif self.cache and report.when == "teardown" and item.stash.get(DIGEST, ""):
            # Not if a file changed meanwhile.
            digest = digest_of(item.config.rootpath, inputs_of(item))
            if digest == item.stash[DIGEST]:
                today = datetime.datetime.now(datetime.UTC).date().isoformat()
                self.cache.set(key_of(item), {"digest": digest, "date": today})
        return report

    def pytest_report_teststatus(
        self, report: pytest.TestReport | pytest.CollectReport
    ) -> tuple[str, str, str] | None:
        return ("proved", "p", "PROVED") if report.skipped and text_of(report) else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        proved = Counter(text_of(report) for report in terminalreporter.stats.get("proved", ()))
        for text, count in proved.items():
            terminalreporter.write_line(f"{count} tests not repeated: {text}", yellow=True)


def key_of(item: pytest.Item) -> str:
    return f"fastcoll/proofs/{hashlib.sha256(item.nodeid.encode()).hexdigest()[:16]}"


def text_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    properties = getattr(report, "user_properties", ())  # a file that is skipped whole has none
    return str(dict(properties).get("proved", ""))
