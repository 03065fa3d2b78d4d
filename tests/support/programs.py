# SPDX-License-Identifier: Apache-2.0
"""Programs that tests build and run: compilers, model checkers, and their products.

Decides the result of a missing tool, and reads the table of mutations that these tests prove.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def need(*tools: str) -> None:
    """Skip where a tool or a file is missing; fail there in CI."""
    missing = [tool for tool in tools if shutil.which(tool) is None and not Path(tool).is_file()]
    if missing and os.environ.get("CI"):
        pytest.fail(f"missing: {', '.join(missing)}")
    if missing:
        pytest.skip(f"not run: {', '.join(missing)} not installed")


def run(
    command: Sequence[str | Path], limit_s: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a program; what it says, on both streams, is its `stdout`."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
        **options,
    )


def build(command: list[str], sources: Sequence[Path], program: Path, limit_s: float) -> None:
    """Compile each source on its own, all at once: ccache keeps no program of several sources."""
    objects = [program.with_name(f"{source.stem}.o") for source in sources]
    commands = [
        [*command, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in pool.map(run, commands, [limit_s] * len(commands)):
            assert done.returncode == 0, done.stdout
    linked = run([*command, *map(str, objects), "-o", str(program)], limit_s)
    assert linked.returncode == 0, linked.stdout


def run_as_told(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of the docs in a folder, by the command that its first line gives."""
    told = re.match(r"# (\w+\.py): run it with  torchrun (.*)\n", text)
    assert told, text
    folder.joinpath(told[1]).write_text(text)
    options = ["--standalone", "--log-dir", "log", *shlex.split(told[2])]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def load_script(path: Path) -> ModuleType:
    """Load a script as a module, with its neighbours importable; its main is not run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        patch.setitem(sys.modules, path.stem, module)  # where its dataclasses look
        spec.loader.exec_module(module)
    return module


def mutations() -> set[tuple[str, str]]:
    """Return the rows of kernels/README.md's table of mutations: the mutation and its catcher."""
    text = Path(__file__).parents[2].joinpath("kernels/README.md").read_text()
    section = text.split("## Mutations\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (.*?) \|$", section, re.MULTILINE)
    return {(name, checker) for name, checkers in rows for checker in checkers.split(", ")}
