# SPDX-License-Identifier: Apache-2.0
"""The C++ of the GPU side on a CUDA made of the CPU: its locks, its contexts, its memory."""

import sys
from pathlib import Path

import pytest

from tests.proofs import FAKES, LIBRARY
from tests.support.fake_cuda import ROOT, build_fake_cuda
from tests.support.programs import run

pytestmark = [
    pytest.mark.proof(*LIBRARY, FAKES),
    pytest.mark.native,
    pytest.mark.timeout(600),
]
_LIMIT_S = 180


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_cuda(tmp_path_factory.mktemp("fake-cuda"))


def check(module: str, program: str, extension: Path) -> None:
    command = [sys.executable, "-m", f"tests.gpu_host.{module}", program, str(extension)]
    done = run(command, _LIMIT_S, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("program", ["contexts", "many_groups", "growing_heap"])
def test_on_a_made_up_gpu(program: str, extension: Path) -> None:
    """See the function of that name in `cuda_programs`."""
    check("cuda_programs", program, extension)


@pytest.mark.parametrize(
    "program",
    ["verbs", "program", "refusals", "carriers", "symmetric", "ends", "traced", "timing"],
)
def test_known_calls(program: str, extension: Path) -> None:
    """See the function of that name in `known_calls`."""
    check("known_calls", program, extension)


@pytest.mark.parametrize("program", ["beside", "late", "captured", "broken", "messages"])
def test_known_works(program: str, extension: Path) -> None:
    """See the function of that name in `known_works`."""
    check("known_works", program, extension)


@pytest.mark.parametrize(
    "program", ["verbs", "lists", "program", "apart", "symmetric", "batches", "batches_by_python"]
)
def test_known_parts(program: str, extension: Path) -> None:
    """See the function of that name in `known_parts`."""
    check("known_parts", program, extension)
