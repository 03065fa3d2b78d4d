# SPDX-License-Identifier: Apache-2.0
"""The C++ of the GPU side on a CUDA made of the CPU: its locks, its contexts, its memory."""

import pytest

from tests.proofs import FAKES, LIBRARY
from tests.support.fake_cuda import ROOT, build_fake_cuda
from tests.support.programs import Said, run_forked

pytestmark = [
    pytest.mark.proof(*LIBRARY, FAKES),
    pytest.mark.native,
    pytest.mark.timeout(600),
]
_LIMIT_S = 400

# module -> functions of it, each in a process of its own
PROGRAMS = {
    "cuda_programs": ("contexts", "many_groups", "growing_heap"),
    "known_calls": (*("program", "refusals", "carriers", "symmetric", "ends", "traced", "timing"),),
    "known_works": ("beside", "late", "captured", "broken", "messages"),
    "known_parts": (
        *("verbs", "lists", "program", "apart", "symmetric", "batches", "batches_by_python"),
    ),
}
CASES = [(module, program) for module, programs in PROGRAMS.items() for program in programs]
RUN = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
runpy.run_module("tests.gpu_host." + sys.argv.pop(1), run_name="__main__")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Said]:
    """Run all programs, as they share the import of torch."""
    folder = tmp_path_factory.mktemp("fake-cuda")
    extension = str(build_fake_cuda(folder))
    words = [(*case, extension) for case in CASES]
    return dict(zip(CASES, run_forked(folder, RUN, words, limit_s=_LIMIT_S, most=2), strict=True))


@pytest.mark.parametrize(("module", "program"), CASES)
def test_on_a_made_up_gpu(module: str, program: str, said: dict[tuple[str, str], Said]) -> None:
    code, _, error = said[module, program]
    assert code == 0, error[-4000:]
