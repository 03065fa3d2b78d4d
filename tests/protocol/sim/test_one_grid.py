# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/one_grid.cu in the simulator, by a runtime made up for it (runtime/), and by nvcc."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.proofs import KERNELS
from tests.protocol.sim.test_nvcc import FLAGS as NVCC_FLAGS
from tests.protocol.sim.test_sim import FLAGS, SCHEDULER
from tests.support.programs import build, need, run

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "bench/gpu/one_grid.cu"
LIMIT_S = 300.0
INPUTS = (*KERNELS, "bench/gpu/one_grid.cu", "bench/gpu/published.cuh")


@pytest.fixture(scope="session")
def one_grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, whose GPU is the simulator."""
    need("g++")
    folder = tmp_path_factory.mktemp("one_grid")
    command = ["g++", *FLAGS, f"-I{ROOT}/tests/protocol/sim/runtime"]
    source = folder / "one_grid.cpp"
    source.write_text(f'#include "{PROGRAM}"\n')
    build(command, [ROOT / SCHEDULER, source], folder / "program", LIMIT_S)
    return folder / "program"


@pytest.mark.proof(*INPUTS)
@pytest.mark.native
@pytest.mark.parametrize("words", ["check 4096 2", "check 40000 3"])
def test_all_ways_are_right(one_grid: Path, words: str) -> None:
    done = run([one_grid, *words.split()], LIMIT_S)
    assert (done.returncode, done.stdout) == (0, "ok\n")


@pytest.mark.proof(*INPUTS)
@pytest.mark.native
def test_each_way_has_a_time(one_grid: Path) -> None:
    done = run([one_grid, "time", "16", "2", "3"], LIMIT_S)
    assert done.returncode == 0, done.stdout
    document = json.loads(done.stdout)
    assert document["complete"]
    names = ["one_shot in LL packs", "one_shot", "two_shot", "ring", "chain"]
    names += ["published one-stage", "published two-stage"]
    times = [row for row in document["rows"] if row["unit"] == "us"]
    found = [(row["what"], row["case"], row["ranks"], row["size_bytes"]) for row in times]
    assert found == [
        (f"one grid: {name}", f"16 bytes, {ranks} ranks", ranks, 16)
        for ranks in (2, 3)
        for name in names
    ]
    assert all(row["value"] == 20 for row in times)  # 1 ms for 50 calls
    others = [row for row in document["rows"] if row["unit"] != "us"]
    assert {(row["case"], row["unit"], row["value"]) for row in others} == {
        ("a thread", "registers", 90),
        ("a thread", "bytes of local memory", 0),
        ("an SM", "blocks", 1),
    }
    assert len(others) == 3 * 10


@pytest.mark.proof(*INPUTS)
@pytest.mark.native
@pytest.mark.parametrize(
    ("damages", "told"),
    [("high", "rank 0 has "), ("bits", "rank 1 has other bits than rank 0")],
)
def test_a_wrong_bit_is_found(one_grid: Path, damages: str, told: str) -> None:
    """Negative control."""
    for step in ("check", "time"):
        env = {**os.environ, "FAKE_CUDA_DAMAGES": damages}
        done = run([one_grid, step, "16", "2"], LIMIT_S, env=env)
        assert done.returncode == 1
        assert f"WRONG: one_shot in LL packs, 2 ranks, 16 bytes: {told}" in done.stdout


@pytest.mark.native
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "one_grid check or time, MOST_BYTES, RANKS..."),
        ("check 16", "one_grid check or time, MOST_BYTES, RANKS..."),
        ("run 16 2", "one_grid check or time, MOST_BYTES, RANKS..."),
        ("check many 2", "one_grid check or time, MOST_BYTES, RANKS..."),
        ("check 16 9", "9: 1 to 8 ranks are possible"),
    ],
)
def test_wrong_arguments_are_refused(one_grid: Path, words: str, said: str) -> None:
    done = run([one_grid, *words.split()], LIMIT_S)
    assert (done.returncode, done.stdout) == (2, f"{said}\n")


@pytest.mark.proof(*INPUTS)
@pytest.mark.native
def test_nvcc_takes_it_and_it_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("not run: nvcc not installed")
    command = [nvcc, *NVCC_FLAGS, f"-I{ROOT}/bench/gpu", "-arch=sm_90", "-Xptxas", "-v"]
    done = run([*command, "-o", tmp_path / "one_grid", PROGRAM], LIMIT_S)
    assert done.returncode == 0, done.stdout
    kernels = done.stdout.count("run_ranks") // 2  # named twice: compiled, and its properties
    assert kernels == done.stdout.count("registers, used 1 barriers") == 9, done.stdout
    # As it runs where there is no GPU, whatever this machine has.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = run([tmp_path / "one_grid", "check", "16", "2"], LIMIT_S, env=env)
    assert (done.returncode, done.stdout) == (77, "no GPU: nothing was run\n")
