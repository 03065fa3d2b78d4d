# SPDX-License-Identifier: Apache-2.0
"""--skip-proved leaves out only tests that passed with the same bytes and the same tools."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import proofs

ROOT = Path(__file__).parents[2]
CONFTEST = """
import proofs
def pytest_addoption(parser): parser.addoption(proofs.OPTION, action="store_true")
def pytest_configure(config): config.pluginmanager.register(proofs.Proofs(config))
"""
TEST = """
import pytest
SOURCE = open("csrc/source.h").read()
PROOF = pytest.mark.proof("csrc", "kernels")
@pytest.mark.parametrize("planted", ["", pytest.param("bug", marks=PROOF)])
def test_it(planted): assert "broken" not in SOURCE
@pytest.mark.proof("csrc")
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.proof("csrc")
@pytest.mark.xfail
def test_expected(): assert False
"""

SLOW = """
import pytest
def test_quick(): pass
@pytest.mark.slow
def test_slow(): pass
"""

FIXTURES = """
import pytest
from tests.support import lent
@pytest.fixture
def pools(): return lent.A
"""


class Project:
    """A tree with one test that always runs, one proof, and two that prove nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("csrc", "kernels", "tests/protocol/native", "tests/support", "scripts", "bin"):
            (folder / name).mkdir(parents=True)
        names = ("constraints.txt", "pyproject.toml", "setup.py")
        for name in (*names, "tests/support/harness.py", "scripts/verbs.py"):
            (folder / name).touch()
        (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra\nmarkers =\n proof\n slow\n")
        (folder / "tests/conftest.py").write_text(CONFTEST)
        (folder / "tests/proofs.py").write_text((ROOT / "tests/proofs.py").read_text())
        (folder / "tests/protocol/native/test_it.py").write_text(TEST)
        absent = "import pytest; pytest.importorskip('nowhere')"
        (folder / "tests/protocol/native/test_absent.py").write_text(absent)
        self.source("int a;")
        self.compiler("12.1")

    def source(self, text: str) -> None:
        (self.folder / "csrc/source.h").write_text(text)

    def compiler(self, version: str) -> None:
        tool = self.folder / "bin/g++"
        tool.write_text(f"#!/bin/sh\necho {version}\n")
        tool.chmod(0o755)

    def run(self, *options: str) -> str:
        """Return the output of pytest; "N proved" counts the tests that it left out."""
        env = {
            **os.environ,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "PYTEST_ADDOPTS": "",
            "PYTHONPATH": str(self.folder),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", *options]
        done = subprocess.run(
            [*command, "tests"],
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


RAN = "2 passed, 2 skipped, 1 xfailed in"
LEFT_OUT = "1 passed, 2 skipped, 1 xfailed, 1 proved in"


@pytest.mark.long
def test_a_changed_byte_or_compiler_repeats_a_proof(project: Project) -> None:
    skip = proofs.OPTION
    assert RAN in project.run(skip)
    said = project.run(skip, "-p", "xdist.plugin", "-n", "1")
    assert LEFT_OUT in said
    assert "1 tests not repeated: proved by " in said
    assert RAN in project.run(), "without the option everything runs"
    project.source("int b;")
    assert RAN in project.run(skip)
    assert LEFT_OUT in project.run(skip)
    project.compiler("12.2")
    assert RAN in project.run(skip)


@pytest.mark.long
def test_a_slow_test_of_the_library_is_a_proof(project: Project) -> None:
    for room in ("contract", "tools"):
        (project.folder / "tests" / room).mkdir()
        (project.folder / "tests" / room / f"test_{room}.py").write_text(SLOW)
    library = project.folder / "python/fastcoll/errors.py"
    command = project.folder / "python/fastcoll/cli/run.py"
    command.parent.mkdir(parents=True)
    for file in (library, command, project.folder / "tests/support/fake.cpp"):
        file.touch()
    skip = proofs.OPTION
    ran, left_out, repeated = (
        f"{passed} passed, 2 skipped, 1 xfailed{proved} in"
        for passed, proved in ((6, ""), (4, ", 2 proved"), (5, ", 1 proved"))
    )
    assert ran in project.run(skip)
    assert left_out in project.run(skip)
    library.write_text("A = 1")
    assert repeated in project.run(skip)
    command.write_text("A = 1")
    assert left_out in project.run(skip), "no other room imports the command line"
    test = project.folder / "tests/contract/test_contract.py"
    test.write_text(f"if 0: from fastcoll.cli import run\n{SLOW}")
    project.run(skip)
    command.write_text("A = 2")
    assert repeated in project.run(skip), "this test does"


@pytest.mark.long
def test_what_a_proof_and_its_fixtures_import_counts(project: Project) -> None:
    support = project.folder / "tests/support"
    names = ("used", "lent", "run", "unused")
    imported, of_fixture, of_program, other = (support / f"{name}.py" for name in names)
    for file in (imported, of_fixture, of_program, other):
        file.write_text("A = 1\n")
    program = project.folder / "tests/protocol/native/program.py"  # run by a test, not imported
    program.write_text("from tests.support import run\n")
    (support / "calls.py").write_text("from tests.support import used\n")
    (project.folder / "tests/conftest.py").write_text(CONFTEST + FIXTURES)
    test = TEST.replace("test_it(planted)", "test_it(planted, pools)")
    (project.folder / "tests/protocol/native/test_it.py").write_text(
        f"from tests.support.calls import used\n{test}"
    )
    assert RAN in project.run(proofs.OPTION)
    other.write_text("A = 2\n")
    assert LEFT_OUT in project.run(proofs.OPTION)
    beside = project.folder / "tests/protocol/native/test_absent.py"
    beside.write_text(beside.read_text() + "\n")
    assert LEFT_OUT in project.run(proofs.OPTION)
    for file in (imported, of_fixture, of_program):
        file.write_text("A = 2\n")
        assert RAN in project.run(proofs.OPTION), file.name


def test_a_failed_run_proves_nothing(project: Project) -> None:
    project.source("broken")
    for _ in range(2):
        assert "2 failed, 2 skipped, 1 xfailed in" in project.run(proofs.OPTION)


def test_every_byte_of_every_input_counts(tmp_path: Path) -> None:
    for name in ("csrc", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    seen = {proofs.digest_of(tmp_path, ("csrc", "kernels"))}
    for path in files:
        path.write_bytes(path.read_bytes() + b"\n")
        seen.add(proofs.digest_of(tmp_path, ("csrc", "kernels")))
    assert len(seen) == 1 + len(files)
    assert len(files) > 50


def test_an_input_that_is_nowhere_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no file is called csrc/nowhere"):
        proofs.digest_of(ROOT, ("csrc/nowhere",))
