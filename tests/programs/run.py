# SPDX-License-Identifier: Apache-2.0
"""Runs a program of another library on several ranks, and returns what each rank found.

A program is a function of a module here. It is called with the name of torch's backend and returns
what JSON can hold. Every rank is a new process, as under torchrun, since these libraries keep
state in their modules.
"""

import importlib
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run

ROOT = Path(__file__).parents[2]
LIMIT_S = 900
_LISTS = [Path(__file__).with_name(name) for name in ("nightly.txt", "titans.txt")]
_MARK = "the program found: "


def listed_version(package: str) -> str:
    """Return the version in nightly.txt or titans.txt."""
    text = "".join(one.read_text() for one in _LISTS)
    lines = [line.split("==") for line in text.splitlines() if "==" in line]
    return {name.partition("[")[0].strip(): version.strip() for name, version in lines}[package]


def need_package(package: str) -> None:
    """Skip where a package is not the tested version; fail there in scripts/nightly.sh."""
    wanted = listed_version(package)
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = "not"
    if found != wanted:
        say = pytest.fail if os.environ.get("REAL_PROGRAMS") else pytest.skip
        say(f"not run: {package} {found} installed; {_LISTS[0].parent} has {wanted}")


def run_ranks(
    program: str, *args: str, folder: Path, torch_backend: str = "python", world: int = 2
) -> list[Any]:
    """Run `module:function` on the ranks of torchrun; return each one's result."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--log-dir", str(folder / "log")]
    torchrun.append(f"--nproc-per-node={world}")
    found = _run([*torchrun, "-m", "tests.programs.run", program, *args], folder, torch_backend)
    assert len(found) == world, found
    return found


def run_alone(program: str, *args: str, folder: Path, torch_backend: str = "python") -> Any:
    """Run `module:function` in one process, which starts its own ranks; return its result."""
    [found] = _run(["-m", "tests.programs.run", program, *args], folder, torch_backend)
    return found


def _run(arguments: list[str], folder: Path, torch_backend: str) -> list[Any]:
    env = {
        **os.environ,
        "FASTCOLL_TORCH_BACKEND": torch_backend,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PROGRAM_FOLDER": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    done = run([sys.executable, *arguments], LIMIT_S, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout[-6000:]
    lines = [line.partition(_MARK)[2] for line in done.stdout.splitlines() if _MARK in line]
    return [result for _, result in sorted(map(json.loads, lines), key=lambda pair: pair[0])]


if __name__ == "__main__":
    module, name = sys.argv[1].split(":")
    result = getattr(importlib.import_module(module), name)(*sys.argv[2:])
    sys.stdout.write(f"\n{_MARK}{json.dumps([int(os.environ.get('RANK', 0)), result])}\n")
    sys.stdout.flush()
