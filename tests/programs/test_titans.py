# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Llama has the losses on several ranks that it has on one.

Gloo can't be the oracle: it refuses the scaled sum, by which torchtitan's FSDP adds its gradients.
"""

from pathlib import Path

import pytest

from tests.programs.run import need_package, run_ranks
from tests.support.backends import BACKENDS

PROGRAM = "tests.programs.titans:llama"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The steps of one rank."""
    need_package("torchtitan")
    found: list[list[float]]
    [found] = run_ranks(PROGRAM, "gloo", folder=tmp_path_factory.mktemp("alone"), world=1)
    return found


@pytest.mark.parametrize("torch_backend", BACKENDS)
@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, ["data_parallel_shard_degree=2"]),
        (2, ["tensor_parallel_degree=2"]),
        (4, ["data_parallel_replicate_degree=2", "data_parallel_shard_degree=2"]),
        (4, ["data_parallel_shard_degree=2", "tensor_parallel_degree=2"]),
    ],
)
def test_ranks_train_the_model_of_one(
    alone: list[list[float]], world: int, degrees: list[str], torch_backend: str, tmp_path: Path
) -> None:
    for found in run_ranks(
        PROGRAM, "fastcoll", *degrees, folder=tmp_path, torch_backend=torch_backend, world=world
    ):
        for (loss, norm), (wanted_loss, wanted_norm) in zip(found, alone, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=1e-4)
            assert norm == pytest.approx(wanted_norm, rel=1e-3)
