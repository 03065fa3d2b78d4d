# SPDX-License-Identifier: Apache-2.0
"""The examples and commands of the README work as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import load_script, run_as_told

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.long
def test_the_ten_lines_run(tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in program.splitlines() if not line.startswith("#")]) == 10
    done = run_as_told(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted("".join(done.stdout.split())) == sorted("3.00.0" * 2)  # the ranks' texts may mix


def test_the_first_screen_is_short_and_says_that_no_gpu_ran_it() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    screen = "\n".join(lines[:40])
    for text in ("**never run on a GPU**", "pip install", "](docs/pictures/", "| Gloo takes |"):
        assert text in screen, text


def test_the_two_commands_exist() -> None:
    install, commands = re.findall(r"```bash\n(.*?)\n```", README, re.S)
    assert install == "pip install .\nfastcoll doctor"
    assert commands.split("\n") == ["scripts/demo.sh", "scripts/test.sh"]
    for command in commands.split("\n"):
        assert (ROOT / command).stat().st_mode & 0o111


COMMANDS = {
    command
    for document in ("CONTRIBUTING.md", "scripts/nightly.sh")
    for command in re.findall(
        r"python (-m tests[\w.]+|tests/[\w/]+\.py)", (ROOT / document).read_text()
    )
}


@pytest.mark.slow  # each imports torch
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_program_of_the_tests_starts_without_pytest(command: str) -> None:
    """Pytest adds folders to import from, and a program that a user starts has none of them."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *command.split(), "--help"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_a_package_page_has_no_dead_link() -> None:
    """A package index shows the README without the files beside it."""
    page = load_script(ROOT / "setup.py").package_page(README)
    assert "](" not in page.replace("](http", "")
    assert "All figures (`bench/results/README.md`)" in page
    assert "where it is slow (`bench/README.md`)" in page


def test_links_lead_somewhere() -> None:
    for document in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        for target in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (ROOT / target).exists(), f"{document} -> {target}"


IMPORTS = """
import os, signal, time
from collections.abc import Callable
import pytest, torch
from fastcoll.measure.sizes import format_size
from tests.support.draw import VERBS
from tests.support.harness import LATE_S, Attempt, Pool, Rank, attempt
from tests.support.sites import Site
"""


@pytest.mark.slow  # starts ranks of its own
def test_the_three_tests_that_are_shown_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "tests/README.md").read_text(), re.S)
    assert len(blocks) == 3
    file = tmp_path / "test_shown.py"
    file.write_text("\n".join([IMPORTS, *blocks]))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.conftest",
    ]
    chosen = "one-node-2 or killed or short"
    done = subprocess.run(
        [*command, "-c", ROOT / "pyproject.toml", "-m", "not slow", "-k", chosen, file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert re.search(r"^11 passed", done.stdout, re.M), done.stdout + done.stderr
