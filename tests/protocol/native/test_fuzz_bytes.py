# SPDX-License-Identifier: Apache-2.0
"""Some seconds of fuzz_bytes.py for every target, and of each with a check taken out."""

import re
from pathlib import Path

import pytest

from tests.proofs import CPP
from tests.protocol.native import fuzz_bytes
from tests.support.programs import need, run

# The command of fuzz_bytes.py takes as long as it is told.
SECONDS = 5
FINDING_LIMIT_S = 60  # most planted bugs are found within a second

pytestmark = [pytest.mark.proof(*CPP), pytest.mark.native, pytest.mark.timeout(600)]


def need_fuzzer() -> None:
    need(fuzz_bytes.COMPILER)
    need(fuzz_bytes.runtime())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_fuzzer()
    return fuzz_bytes.build(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(scope="module")
def damaged_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_fuzzer()
    folder = tmp_path_factory.mktemp("planted")
    bugs = list(fuzz_bytes.TARGETS.values())
    return fuzz_bytes.build(folder, fuzz_bytes.plant(bugs, folder / "sources"))


@pytest.mark.parametrize("target", fuzz_bytes.TARGETS)
def test_damaged_bytes_do_no_harm(program: Path, target: str) -> None:
    done = run(fuzz_bytes.command_of(program, target, SECONDS, seed=1), 10 * SECONDS + 60)
    assert done.returncode == 0, done.stdout[-4000:]
    assert fuzz_bytes.num_runs(done.stdout) > 100


@pytest.mark.parametrize("target", fuzz_bytes.TARGETS)
def test_a_check_taken_out_is_found(damaged_program: Path, target: str) -> None:
    command = fuzz_bytes.command_of(damaged_program, target, FINDING_LIMIT_S, seed=1)
    done = run(command, 3 * FINDING_LIMIT_S)
    assert done.returncode != 0, f"the planted bug went unseen:\n{done.stdout[-4000:]}"
    assert re.search("WRONG|ERROR: |runtime error", done.stdout), done.stdout[-4000:]
