# SPDX-License-Identifier: Apache-2.0
"""The package builds from its source archive without a warning, and installs editable."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.tree import source_files

ROOT = Path(__file__).parents[2]

# Machine code for three GPUs takes minutes on two cores that others use too.
pytestmark = pytest.mark.timeout(900)


def attempt(*command: str | Path, cwd: Path, **env: str) -> tuple[int, str]:
    """Run with every warning shown; return the exit code and the output.

    ccache sees paths from the folder, so it finds objects of other copies of the tree.
    """
    env = {"CCACHE_BASEDIR": str(cwd), **env}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PYTHONWARNINGS": "default", "PYTHONPATH": "", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    code, output = attempt(*command, cwd=cwd, **env)
    assert code == 0, output
    return output


def warnings_of_build(output: str) -> list[str]:
    lines = [line for line in output.splitlines() if re.search(r"\bwarning\b|deprecat", line, re.I)]
    # Not the build's: pip turns byte-compiling off itself, and warns of its own affairs.
    theirs = ("byte-compiling is disabled", "WARNING: Location", "WARNING: Running pip", "/pip/")
    return [line for line in lines if not any(text in line for text in theirs)]


def left_out(archive: Path) -> list[str]:
    """Return the files of the checkout that a source archive lacks, but for git's and pictures."""
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    others = re.compile(r"\.git|bench/results/.*\.png$")
    return [name for name in source_files() if name not in packed and not others.match(name)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a copy of the tree in a folder with a space in its name."""
    copy = tmp_path / "a checkout"
    copy.mkdir()
    for name in source_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


def make_source_archive(checkout: Path) -> tuple[Path, str]:
    """Build the source archive; return it and what the build printed."""
    sdist = "import setuptools.build_meta as b; b.build_sdist('dist')"
    output = run(sys.executable, "-c", sdist, cwd=checkout)
    [archive] = (checkout / "dist").glob("fastcoll-*.tar.gz")
    return archive, output


@pytest.mark.long
def test_the_source_archive_has_every_file(checkout: Path) -> None:
    archive, _ = make_source_archive(checkout)
    assert left_out(archive) == []


def test_a_file_that_the_archive_lacks_is_found(checkout: Path) -> None:
    lines = (checkout / "MANIFEST.in").read_text().splitlines()
    kept = (line for line in lines if not line.startswith("recursive-include bench "))
    (checkout / "MANIFEST.in").write_text("\n".join(kept))
    archive, _ = make_source_archive(checkout)
    assert "bench/gpu/queues.cu" in left_out(archive)


@pytest.mark.slow
def test_the_source_archive_builds_a_whole_wheel_without_warnings(
    checkout: Path, tmp_path: Path
) -> None:
    archive, output = make_source_archive(checkout)
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    output += run(*command, "-w", tmp_path / "wheels", ".", cwd=unpacked)
    assert warnings_of_build(output) == []

    [wheel] = (tmp_path / "wheels").glob("fastcoll-*.whl")
    entries = zipfile.ZipFile(wheel).infolist()
    packed = {one.filename for one in entries}
    size_bytes = sum(one.compress_size for one in entries if "/_cuda." not in one.filename)
    assert size_bytes <= 2_000_000, "a wheel of the CPU side is small"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    extensions = {f"fastcoll/_C{suffix}"}
    if shutil.which("nvcc"):
        extensions.add(f"fastcoll/_cuda{suffix}")
    sources = {
        path.relative_to(checkout / folder).as_posix()
        for folder, package in (
            ("python", "fastcoll"),
            ("python", "fastcoll_autoload"),
            ("python", "fastcoll_model"),
            ("kernels", "fastcoll_kernels"),
        )
        for pattern in (
            "**/*.py",
            "**/*.pyi",
            "**/py.typed",
            "**/*.json",
            "**/*.c",
            "**/*.cpp",
            "**/*.h",
        )
        for path in (checkout / folder / package).glob(pattern)
    }
    assert {*extensions, *sources} <= packed
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in packed)
    installed = {name for name in packed if ".dist-info/" not in name}
    assert installed == {*extensions, *sources}, "nothing else is shipped"


@pytest.mark.slow
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
    output = run(*command, cwd=checkout, FASTCOLL_CUDA="0")
    assert warnings_of_build(output) == []
    packages = "fastcoll, fastcoll._C, fastcoll_kernels, fastcoll_model"
    where = f"import {packages}; print(fastcoll.__file__)"
    assert str(checkout) in run(python, "-c", where, cwd=tmp_path)


def path_without_nvcc(folder: Path) -> str:
    """Return a PATH with all tools but nvcc."""
    folder.mkdir()
    for part in reversed(os.environ["PATH"].split(os.pathsep)):
        for tool in Path(part).glob("*") if Path(part).is_dir() else ():
            if tool.name != "nvcc" and tool.is_file():
                (folder / tool.name).unlink(missing_ok=True)
                (folder / tool.name).symlink_to(tool)
    return str(folder)


BUILD = (sys.executable, "setup.py", "build_ext", "-b", "out", "-t", "objects")


@pytest.mark.slow
def test_gpu_support_that_is_asked_for_needs_nvcc(checkout: Path, tmp_path: Path) -> None:
    tools = path_without_nvcc(tmp_path / "tools")
    env = {"PATH": tools, "CUDA_HOME": "/nowhere"}
    code, output = attempt(*BUILD, cwd=checkout, FASTCOLL_CUDA="1", **env)
    assert code != 0
    assert "CUDA_HOME=/nowhere has no bin/nvcc" in output
    assert "put nvcc on PATH, or set CUDA_HOME" in output
    code, output = attempt(*BUILD, cwd=checkout, FASTCOLL_CUDA="maybe", **env)
    assert code != 0
    assert "FASTCOLL_CUDA=maybe: must be auto, 0 or 1" in output
    assert not (checkout / "out").exists(), "told before anything was compiled"


# The answers of a good toolkit to the questions before it compiles.
HONEST = """case "$*" in
  *--dryrun*) echo "#$ TOP=$PWD" >&2; exit 0 ;;
  *--list-gpu-arch*) echo compute_90; exit 0 ;;
esac
"""


@pytest.mark.slow
def test_gpus_that_nvcc_does_not_know_are_refused(checkout: Path, tmp_path: Path) -> None:
    tools = path_without_nvcc(tmp_path / "tools")
    Path(tools, "nvcc").write_text(f"#!/bin/sh\n{HONEST}exit 3")
    Path(tools, "nvcc").chmod(0o755)
    env = {"PATH": tools, "CUDA_HOME": "", "FASTCOLL_CUDA": "1", "FASTCOLL_CUDA_ARCHS": "7,8"}
    code, output = attempt(*BUILD, cwd=checkout, **env)
    assert code != 0
    assert "compiles for none of sm_7, sm_8" in output
    assert not (checkout / "out").exists(), "told before anything was compiled"


# Stands for the host's compiler, whose own work the tests above see: leaves an empty file.
HASTY = """while [ "$1" != -o ]; do shift; done
: > "$2"
"""


@pytest.mark.slow
@pytest.mark.parametrize("nvcc", ["echo out of order >&2; exit 3", HONEST + "exit 3"])
def test_a_broken_nvcc_costs_gpu_support_only(checkout: Path, tmp_path: Path, nvcc: str) -> None:
    tools = path_without_nvcc(tmp_path / "tools")
    for name, text in (("nvcc", nvcc), ("hasty", HASTY)):
        Path(tools, name).write_text(f"#!/bin/sh\n{text}\n")
        Path(tools, name).chmod(0o755)
    env = {"PATH": tools, "CUDA_HOME": "/nowhere", "FASTCOLL_CUDA": ""}
    output = run(*BUILD, cwd=checkout, CC="hasty", CXX="hasty", **env)
    [warning] = [line for line in output.splitlines() if "no GPU support" in line]
    assert "warning" in warning
    built = [path.name for path in (checkout / "out").rglob("*.so")]
    assert [name.split(".")[0] for name in built] == ["_C"]


# In place of an environment's python and pip: the packages can't be had.
UNREACHABLE = """#!/bin/bash
case "$*" in
  "-m pip "*" -r "*) echo "no such package" >&2; exit 1 ;;
  "-m pip "*) exec sleep 1 ;; # the wheel
esac
exec python3 "$@"
"""


def test_an_install_that_failed_is_tried_again(checkout: Path, tmp_path: Path) -> None:
    (bin_ := tmp_path / "bin").mkdir()
    for name in ("python", "pip"):
        (bin_ / name).write_text(UNREACHABLE)
        (bin_ / name).chmod(0o755)
    for _ in range(2):
        test = ("bash", "scripts/test.sh")
        code, output = attempt(*test, cwd=checkout, FASTCOLL_VENV=str(tmp_path))
        assert (code, output.count("no such package")) == (1, 1), output
