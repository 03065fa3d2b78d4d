# SPDX-License-Identifier: Apache-2.0
"""The package builds from its source archive without a warning, and installs editable."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: str | Path, cwd: Path) -> str:
    """Runs with every warning shown; the output counts."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PYTHONWARNINGS": "default", "PYTHONPATH": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def warnings_of_build(output: str) -> list[str]:
    lines = [line for line in output.splitlines() if re.search(r"\bwarning\b|deprecat", line, re.I)]
    # Not the build's: pip turns byte-compiling off itself, and warns of its own affairs.
    theirs = ("byte-compiling is disabled", "WARNING: Location", "WARNING: Running pip", "/pip/")
    return [line for line in lines if not any(text in line for text in theirs)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the tree in a folder with a space in its name."""
    copy = tmp_path / "a checkout"
    copy.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


def test_the_source_archive_builds_a_whole_wheel_without_warnings(
    checkout: Path, tmp_path: Path
) -> None:
    sdist = "import setuptools.build_meta as b; b.build_sdist('dist')"
    output = run(sys.executable, "-c", sdist, cwd=checkout)
    [archive] = (checkout / "dist").glob("fastcoll-*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    output += run(*command, "-w", tmp_path / "wheels", archive, cwd=tmp_path)
    assert warnings_of_build(output) == []

    [wheel] = (tmp_path / "wheels").glob("fastcoll-*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    extension = f"fastcoll/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = {
        path.relative_to(checkout / folder).as_posix()
        for folder, package in (("python", "fastcoll"), ("kernels", "fastcoll_kernels"))
        for pattern in ("**/*.py", "**/*.pyi", "**/py.typed", "**/*.json", "**/*.c")
        for path in (checkout / folder / package).glob(pattern)
    }
    assert {extension, *sources} <= packed
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in packed)
    installed = {name for name in packed if ".dist-info/" not in name}
    assert installed == {extension, *sources}, "nothing else is shipped"


def test_it_installs_editable(checkout: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    purelib = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    )
    # torch and the build tools come from the environment that runs the tests.
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "fastcoll" not in entry.name:
            Path(purelib.strip(), entry.name).symlink_to(entry)
    pip = [sys.executable, "-m", "pip", "--python", python]
    command = [*pip, "install", "-v", "--no-deps", "--no-build-isolation", "-e", "."]
    output = run(*command, cwd=checkout)
    assert warnings_of_build(output) == []
    where = "import fastcoll, fastcoll._C, fastcoll_kernels; print(fastcoll.__file__)"
    assert str(checkout) in run(python, "-c", where, cwd=tmp_path)
