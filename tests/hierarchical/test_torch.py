# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's programs on the backend "fastcoll", unchanged, over two nodes."""

from collections.abc import Callable

import pytest
import test_torch_backend as programs
import test_training as training
from backends import Program, on_backend, same

from harness import Pool, Setup

FreshPool = Callable[[int, Setup], Pool]
WORLD = 4


def two_nodes(fresh_pool: FreshPool) -> Pool:
    return fresh_pool(WORLD, Setup(init=False, nodes="aabb"))


@pytest.mark.slow
def test_verbs_give_what_they_give_on_gloo(fresh_pool: FreshPool) -> None:
    pool = two_nodes(fresh_pool)
    for program in (programs.reductions, programs.moves, programs.shuffles):
        ours, theirs = (pool.run(on_backend, name, program) for name in ("fastcoll", "gloo"))
        assert same(ours, theirs), program.__name__


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [training.data_parallel, training.fully_sharded, training.tensor_parallel]
)
def test_training_is_that_of_one_process(fresh_pool: FreshPool, program: Program) -> None:
    training.check_training(lambda world: two_nodes(fresh_pool), program, WORLD)
