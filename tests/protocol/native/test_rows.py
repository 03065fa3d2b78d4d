# SPDX-License-Identifier: Apache-2.0
"""The kernels of rows, compiled for each instruction set, against the oracle's cases.

Decides the builds: as shipped, under sanitizers, and for aarch64 under qemu.
"""

from pathlib import Path

import pytest

from tests.proofs import CPP
from tests.protocol.native.row_cases import write_cases
from tests.protocol.native.test_native import BUILDS, RUN_LIMIT_S, Compiler
from tests.support.programs import need, run

pytestmark = [pytest.mark.proof(*CPP), pytest.mark.native]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    path = tmp_path_factory.mktemp("rows") / "cases"
    return path, write_cases(str(path))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("build_name", ["plain", "address", "aarch64"])
def test_rows_have_the_oracles_bits(
    build_name: str, cases: tuple[Path, int], tmp_path: Path
) -> None:
    build = BUILDS[build_name]
    need(build.compiler, *build.runner[:1])
    program = Compiler(tmp_path).program("test_rows", build_name)
    path, count = cases
    done = run([*build.runner, str(program), str(path)], RUN_LIMIT_S)
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{count} cases" in done.stdout
