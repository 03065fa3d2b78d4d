# SPDX-License-Identifier: Apache-2.0
"""Trainings of other libraries have the numbers that they have on Gloo, bit by bit.

Two ranks: Gloo adds in an order of its own, which can't differ then.
"""

from pathlib import Path

import pytest

from tests.programs.run import need_package, run_ranks
from tests.support.backends import BACKENDS

TRAINERS = "tests.programs.trainers"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]


@pytest.mark.parametrize("torch_backend", BACKENDS)
@pytest.mark.parametrize(
    ("package", "program"),
    [
        ("lightning", "lightning"),
        ("lightning", "fabric"),
        ("accelerate", "accelerate"),
        ("transformers", "trainer"),
        ("transformers", "tensor_parallel"),
        ("deepspeed", "deepspeed"),
        ("trl", "grpo"),
        ("torchmetrics", "torchmetrics"),
    ],
)
def test_a_training_is_that_on_gloo(
    package: str, program: str, torch_backend: str, tmp_path: Path
) -> None:
    need_package(package)
    on_gloo, ours = (
        run_ranks(f"{TRAINERS}:{program}", backend, folder=tmp_path, torch_backend=torch_backend)
        for backend in ("gloo", "fastcoll")
    )
    assert ours == on_gloo
