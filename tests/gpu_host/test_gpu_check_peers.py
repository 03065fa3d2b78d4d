# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/check.sh chooses what it measures beside other libraries, on made-up machines."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.programs import run

CHECK = Path(__file__).parents[2] / "bench/gpu/check.sh"
CARRIER = "--ranks {} --algorithm nccl --numerics fast --vs nccl_default --sizes 8,4K,256K,16M"
STEPS = {
    "carrier-1": CARRIER,
    "carrier-2": CARRIER,
    "versus": "--vs nccl,symm_mem,cupy --ranks {} --sizes 8:64M:8",
}
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *is_available*) echo {num_gpus} 90 ;;
  *"fastcoll bench"*) echo "$CUDA_MODULE_LOADING, ${{CUDA_MPS_PIPE_DIRECTORY-alone}}: $*" >>{log} ;;
  *nccl_version*) exit {old_nccl} ;;
esac
"""


@pytest.mark.parametrize(
    ("num_gpus", "mps", "old_nccl", "ranks"),
    [
        (1, False, 0, {"carrier-1": 1}),
        (1, True, 0, {"carrier-1": 1, "carrier-2": 2, "versus": 2}),
        (1, True, 1, {"carrier-1": 1, "versus": 2}),
        (4, False, 1, {"carrier-1": 1, "carrier-2": 2, "versus": 4}),
        (16, False, 1, {"carrier-1": 1, "carrier-2": 2, "versus": 8}),
    ],
)
def test_only_what_does_not_take_turns_is_measured(
    tmp_path: Path, num_gpus: int, mps: bool, old_nccl: int, ranks: dict[str, int]
) -> None:
    """And by NCCL only where it lets several ranks be on one GPU."""
    work = tmp_path / "build/gpu-check"
    for folder in (tmp_path / "bench/gpu", work / "site/fastcoll", tmp_path / "bin"):
        folder.mkdir(parents=True)
    shutil.copy(CHECK, tmp_path / "bench/gpu/check.sh")
    log = tmp_path / "log"
    programs = {
        "python": PYTHON.format(num_gpus=num_gpus, old_nccl=old_nccl, log=log),
        "nvidia-cuda-mps-control": "#!/bin/sh\n",
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHON": "python"}
    env.pop("CUDA_MPS_PIPE_DIRECTORY", None)
    command = [tmp_path / "bench/gpu/check.sh", *(["--mps"] if mps else []), "peers"]
    done = run(command, 120, env=env)
    assert done.returncode == 0, done.stdout
    rows = [line.split("\t") for line in (work / "steps.tsv").read_text().splitlines()]
    assert {row[0]: row[1] for row in rows} == {
        name: "0" if name in ranks else "skip" for name in STEPS
    }
    for (name, world), line in zip(ranks.items(), log.read_text().splitlines(), strict=True):
        place = f"{work}/mps" if mps and world > 1 else "alone"
        words = f"all_reduce --device cuda --rounds 2 {STEPS[name].format(world)}"
        assert line == f"LAZY, {place}: -m fastcoll bench {words} --json {work}/{name}.json"
