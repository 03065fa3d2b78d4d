# SPDX-License-Identifier: Apache-2.0
"""Feeds damaged bytes to all C++ readers of a peer's bytes (fuzz_bytes.cpp), by libFuzzer.

    python -m tests.protocol.native.fuzz_bytes --seconds 600

Decides how it is compiled and run. Plants a bug in a copy of the sources, to see that each target
can find one. The comments of fuzz_bytes.cpp say what a target reads and may do.
"""

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.records import write
from fastcoll.measure.results import provenance

ROOT = Path(__file__).parents[3]
SOURCES = ("csrc/cpu/wait.cpp", "csrc/cpu/process_memory.cpp")
COMPILER = "clang++"
FLAGS = ("-std=c++20", "-O1", "-g", "-pthread", "-Wall")
SANITIZERS = ("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined")
ONE_RUN_LIMIT_S = 10


@dataclass(frozen=True)
class Bug:
    """A check that is taken out of a source: `text`, which stands there once."""

    source: str
    text: str
    instead: str = ""


TARGETS = {
    "program": Bug("csrc/cpu/program.h", "block <= end - num_blocks", "block <= end"),
    "status": Bug("csrc/cpu/status.h", "int(plan.dtype) < kNumDTypes &&"),
    "farewell": Bug("csrc/cpu/wait.cpp", "if (size_t(length) < sizeof *farewell) continue;"),
    "places": Bug("csrc/cpu/group.h", "|| num_bytes > size - offset - start"),
    "messages": Bug("csrc/cpu/p2p_progress.h", "int(dtype) >= kNumDTypes", "false"),
}


def runtime() -> str:
    """Return where libFuzzer's library lies; without it, its bare name."""
    name = f"libclang_rt.fuzzer-{platform.machine()}.a"
    command = [COMPILER, f"--print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def plant(bugs: list[Bug], folder: Path) -> Path:
    """Copy the sources and take the checks out of the copy."""
    for name in ("csrc", "kernels"):
        shutil.copytree(ROOT / name, folder / name)
    for bug in bugs:
        source = folder / bug.source
        text = source.read_text(encoding="utf-8")
        assert text.count(bug.text) == 1, f"{bug.source} has changed: {bug.text}"
        source.write_text(text.replace(bug.text, bug.instead), encoding="utf-8")
    return folder


def build(folder: Path, root: Path = ROOT) -> Path:
    """Compile the program, with the sources below `root`."""
    program = folder / "fuzz_bytes"
    sources = [
        str(ROOT / "tests/protocol/native/fuzz_bytes.cpp"),
        *(str(root / name) for name in SOURCES),
    ]
    includes = [f"-I{root / 'csrc'}", f"-I{root / 'kernels'}"]
    command = [COMPILER, *FLAGS, *SANITIZERS, *includes, *sources, "-o", str(program)]
    subprocess.run(command, check=True, timeout=300, stdin=subprocess.DEVNULL)
    return program


def command_of(program: Path, target: str, seconds: float, seed: int) -> list[str]:
    """Return the command that runs one target; it fails at the first finding, leaves no file."""
    return [
        "env",
        "-C",
        str(program.parent),
        str(program),
        f"--target={target}",
        f"-max_total_time={max(1, round(seconds))}",
        f"-timeout={ONE_RUN_LIMIT_S}",
        f"-seed={seed}",
        "-max_len=4096",
        "-rss_limit_mb=2048",
        "-exact_artifact_path=finding",
    ]


def num_runs(said: str) -> int:
    """Return the number of inputs of a target, as it says at its end."""
    found = re.search(r"^Done (\d+) runs", said, re.MULTILINE)
    assert found, said[-4000:]
    return int(found[1])


def main() -> int:
    """Fuzz all targets in turn, each for its part of the time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, help="where to leave a record of a run without finding"
    )
    options = parser.parse_args()
    origin = provenance()
    runs: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for target in TARGETS:
            seconds = options.seconds / len(TARGETS)
            command = command_of(program, target, seconds, options.seed)
            print(f"== {target}, {seconds:.0f} s", flush=True)
            done = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            print(done.stderr, file=sys.stderr, flush=True)
            if done.returncode != 0:
                print(f"{target}: a finding, with the bytes above", file=sys.stderr)
                return 1
            runs[target] = num_runs(done.stderr)
    print("no finding")
    if options.json:
        record = {
            "kind": "reliability",
            **origin,
            "settings": {"seed": options.seed},
            "took_s": round(options.seconds),
            "counts": runs,
            "findings": [],
        }
        write(record, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
