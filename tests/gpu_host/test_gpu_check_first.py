# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/check.sh on a machine that is lent for ten minutes, with made-up tools."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.gpu_host.gpu_measured import GPU, MEASURED
from tests.support.programs import run

LIMIT_S = 120.0
ROW = {"what": "streams side by side", "case": "of 64", "value": 32, "unit": ""}
TIME = {"what": "one grid: ring", "case": "", "value": 4.5, "unit": "us"}
TIME |= {"ranks": 2, "size_bytes": 16}
DOCUMENTS = {"queues": {"rows": [ROW]}, "one_grid": {"rows": [TIME]}}
# Each tool writes its arguments to the log.
TOOLS = {
    "python": """
case "$*" in
  *is_available*) echo a warning && echo 1 89 && exit ;;
  *"pip list"*) exit ;;
  *report.py*) exec "{python}" "$@" ;;
esac
echo "python $FASTCOLL_CUDA_ARCHS $*" >>{log}
case "$*" in
  *"pip install"*) mkdir -p "{work}/site/fastcoll" ;;
  *measure.py*) sleep 1 && cp {documents}/measured.json "{work}/measured.json" ;;
esac
""",
    "nvcc": """
case "$*" in *--version*) exit ;; esac
echo "nvcc $*" >>{log}
while [ "$1" != -o ]; do shift; done
cp {documents}/"${{2##*/}}" "$2"
""",
    "compute-sanitizer": 'echo "compute-sanitizer $*" >>{log}',
    "nvidia-smi": """
case "$*" in
  *clocks.sm*) echo 1980, 2619, 310.5, 41 && echo 345, 2619, 90.1, 39 && exec sleep 60 ;;
esac
exit 1
""",
}
PROGRAM = """#!/bin/sh
echo "{name} $*" >>{log}
[ "$1" = check ] || cat {documents}/{name}.json
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with check.sh, what it calls, and a `bin` of made-up tools that write to `log`."""
    for folder in ("bench/gpu", "bin", "documents"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("check.sh", "report.py", "live_results.py"):
        shutil.copy(GPU / name, tmp_path / "bench/gpu" / name)
    places = {
        "python": sys.executable,
        "log": tmp_path / "log",
        "work": tmp_path / "build/gpu-check",
        "documents": tmp_path / "documents",
    }
    programs = {f"bin/{name}": "#!/usr/bin/env bash" + text for name, text in TOOLS.items()}
    programs["bin/compute-sanitizer"] = "#!/bin/sh\n" + TOOLS["compute-sanitizer"]
    for name, document in DOCUMENTS.items():
        programs[f"documents/{name}"] = PROGRAM.replace("{name}", name)
        (tmp_path / "documents" / f"{name}.json").write_text(json.dumps(document))
    (tmp_path / "documents/measured.json").write_text(json.dumps(MEASURED))
    for name, text in programs.items():
        (tmp_path / name).write_text(text.format(**places))
        (tmp_path / name).chmod(0o755)
    return tmp_path


def check(machine: Path, *words: str, without: str = "") -> tuple[int, str, list[str]]:
    """Run check.sh; return its exit code and output, and the tools' calls."""
    if without:
        (machine / "bin" / without).unlink()
    env = {**os.environ, "PATH": f"{machine}/bin:{os.environ['PATH']}", "PYTHON": "python"}
    env.pop("FASTCOLL_CUDA_ARCHS", None)
    command = [machine / "bench/gpu/check.sh", *words, "-o", machine / "out"]
    done = run(command, LIMIT_S, env=env)
    return done.returncode, done.stdout, (machine / "log").read_text().splitlines()


@pytest.mark.long
def test_the_first_ten_minutes(machine: Path) -> None:
    code, printed, calls = check(machine, "first", "--commit", "abc")
    assert code == 0, printed
    work = machine / "build/gpu-check"
    # In this order: what fails tells why the rest does.
    wanted = [
        "python 89 -m pip install",
        f"nvcc .* -arch=sm_89 -o {work}/",
        f"nvcc .* -arch=sm_89 -o {work}/",
        "queues",
        "python 89 -c import time, torch",
        r"torch.zeros",
        r"print",
        "python 89 bench/gpu/run_tests.py .*tests/gpu/test_smoke.py",
        "python 89 bench/gpu/run_tests.py .*tests/gpu/test_processes.py",
        "one_grid check 40000 2 3 8",
        "one_grid time 67108864 2 8",
        f"python 89 bench/gpu/kernels.py {work}/kernels.json first",
        f"python 89 bench/gpu/measure.py {work}/measured.json first",
    ]
    for call, pattern in zip(calls, wanted, strict=True):
        assert re.match(pattern, call), f"{call} is not {pattern}"
    document = json.loads((machine / "out/gpu.json").read_text())
    assert document["commit"] == "abc"
    assert document["queues"] == DOCUMENTS["queues"]
    assert document["one_grid"] == DOCUMENTS["one_grid"]
    assert document["clocks"]["sm_mhz"] == [345, 1162.5, 1980]
    assert document["clocks"]["watts"] == [90.1, 200.3, 310.5]
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for line in (
        "streams side by side: 32 of 64",
        "all_reduce in one grid, us, 2 ranks; bytes:",
        "one grid: ring 4.50",
        "while measured, least/median/most: sm_mhz 345/1162.5/1980, memory_mhz 2619/2619/2619, "
        "watts 90.1/200.3/310.5, celsius 39/40/41",
    ):
        assert line in lines


@pytest.mark.long
def test_a_stage_builds_where_nothing_is_built(machine: Path) -> None:
    """And for the GPU that is there; the tools that run one kernel at a time get one grid."""
    for number in (1, 2):
        code, printed, calls = check(machine, "extras")
        assert code == 0, printed
        builds = [call for call in calls if "pip install" in call]
        assert builds == [calls[0]]
        assert calls[0].startswith("python 89 -m pip install")
        program = machine / "build/gpu-check/one_grid"
        assert [call for call in calls if call.startswith("compute-sanitizer")] == [
            f"compute-sanitizer --tool {tool} --error-exitcode 1 {program} check 4096 2"
            for tool in ("memcheck", "racecheck", "synccheck")
        ] * number
        assert sum(call.startswith("nvcc") for call in calls) == 2


@pytest.mark.long
def test_a_machine_that_does_not_tell_its_clocks(machine: Path) -> None:
    code, printed, _ = check(machine, "first", without="nvidia-smi")
    assert code == 0, printed
    assert json.loads((machine / "out/gpu.json").read_text())["clocks"] is None
    assert "while measured" not in printed


@pytest.mark.long
def test_a_build_that_fails_ends_the_run(machine: Path) -> None:
    text = (machine / "bin/python").read_text()
    (machine / "bin/python").write_text(text.replace('mkdir -p "', 'exit 1 "'))
    code, printed, calls = check(machine, "first", "bench")
    assert code == 1
    assert [call.split()[2] for call in calls] == ["-m"]
    assert "nothing is built here, and nothing can be run" in printed
    assert "build            failed (1)" in printed
