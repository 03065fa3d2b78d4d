# SPDX-License-Identifier: Apache-2.0
"""Programs that tests build and run: compilers, model checkers, and their products.

Decides the result of a missing tool, and reads the table of mutations that these tests prove.
"""

import contextlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Fixed addresses: under strong address randomisation an older ThreadSanitizer can't start.
UNDER_THREAD_SANITIZER = (
    "setarch",
    platform.machine(),
    "-R",
    "env",
    "TSAN_OPTIONS=halt_on_error=1",
)


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


def run_python(
    *words: str | Path, limit_s: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs `python` with these words; its two streams are apart."""
    return subprocess.run(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        **options,
    )


def compile_all(
    command: list[str], sources: Sequence[Path], folder: Path, limit_s: float
) -> list[Path]:
    """Compile each source on its own, all at once: ccache keeps no program of several sources."""
    objects = [folder / f"{source.stem}.o" for source in sources]
    commands = [
        [*command, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in pool.map(run, commands, [limit_s] * len(commands)):
            assert done.returncode == 0, done.stdout
    return objects


def build(
    command: list[str],
    sources: Sequence[Path],
    program: Path,
    limit_s: float,
    objects: Sequence[Path] = (),
) -> None:
    """Compile sources, and link them with objects that were compiled by the same command."""
    objects = [*compile_all(command, sources, program.parent, limit_s), *objects]
    linked = run([*command, *map(str, objects), "-o", str(program)], limit_s)
    assert linked.returncode == 0, linked.stdout


Said = tuple[int, str, str]  # what a program returned, and its two streams

# Torch's import takes each process two seconds. So all are forked from one that has done it. Each
# goes on as a main program, and ends as an interpreter ends.
FORKS = """
import json, os, sys
import torch, torch.distributed

program, folder, most, first, *started = json.loads(sys.argv[1])
exec(first)
pids, codes = [], []
for number, words in enumerate(started):
    if number >= most:
        codes.append(os.waitpid(pids[number - most], 0)[1])
    pids.append(os.fork())
    if pids[-1] == 0:
        sys.argv[1:] = words
        for stream in (1, 2):
            file = os.open(f"{folder}/process-{number}-{stream}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, stream)
            os.close(file)
        break
else:
    codes += [os.waitpid(pid, 0)[1] for pid in pids[len(codes):]]
    print([os.waitstatus_to_exitcode(code) for code in codes])
    sys.exit()
exec(compile(program, "<string>", "exec"))
"""


def run_forked(
    folder: Path,
    program: str,
    arguments: Sequence[Sequence[str]],
    options: Sequence[str] = (),
    limit_s: float = 120,
    most: int = 1000,
    first: str = "",
) -> list[Said]:
    """Runs a program with each of these arguments, no more than `most` at a time.

    The process from which they are forked runs `first`, as an import that all of them share.
    """
    words = json.dumps([program, str(folder), most, first, *arguments])
    started = subprocess.Popen(
        [sys.executable, *options, "-c", FORKS, words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        codes = json.loads(started.communicate(timeout=limit_s)[0])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    return [
        (code, *((folder / f"process-{number}-{stream}").read_text() for stream in (1, 2)))
        for number, code in enumerate(codes)
    ]


def run_in_pairs(
    folder: Path,
    program: str,
    hows: Iterable[tuple[str, ...]],
    options: Sequence[str] = (),
    limit_s: float = 120,
    first: str = "",
) -> dict[tuple[str, ...], list[Said]]:
    """Runs a program on two ranks in each of some ways, side by side, as most of it is sleep.

    Its arguments are the rank, a file to meet at, and the way.
    """
    ways = list(hows)
    ranks = [(str(rank), str(folder / "-".join(how)), *how) for how in ways for rank in range(2)]
    said = run_forked(folder, program, ranks, options, limit_s, first=first)
    return {how: said[2 * at : 2 * at + 2] for at, how in enumerate(ways)}


def copy_planted(source: Path, folder: Path, pattern: str, text: str) -> Path:
    """Copy a source with a bug in place of what a pattern matches; none plants none."""
    planted, count = source.read_text(), 1
    if pattern:
        planted, count = re.subn(pattern, text, planted)
    assert count == 1, "the source has changed: plant it anew"
    copy = folder / source.name
    copy.write_text(planted)
    return copy


def assert_caught(done: subprocess.CompletedProcess[str], caught_by: str) -> None:
    """Hold that a program told of its planted bug by these words; or that it passed without one."""
    if caught_by:
        assert done.returncode != 0, f"the planted bug went unseen:\n{done.stdout[-4000:]}"
        assert re.search(caught_by, done.stdout), done.stdout[-4000:]
    else:
        assert done.returncode == 0, done.stdout[-4000:]


def run_as_told(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of the docs in a folder, by the command that its first line gives."""
    told = re.match(r"# (\w+\.py): run it with  torchrun (.*)\n", text)
    assert told, text
    folder.joinpath(told[1]).write_text(text)
    options = ["--standalone", "--log-dir", "log", *shlex.split(told[2])]
    return run_python("-m", "torch.distributed.run", *options, cwd=folder)


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
