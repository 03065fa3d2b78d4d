# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/ that are about JAX: each runs, and fails if a number is wrong."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.jax.start import COMPILE_S
from tests.proofs import LIBRARY
from tests.support.harness import Attempt, Pool, Rank, Setup, attempt
from tests.support.launched import NUMBERS, run_launched
from tests.torch.test_examples import FOLDER, OF_JAX

pytestmark = pytest.mark.proof(*LIBRARY, "examples")

# The call in which a wrong number must make a program fail.
WRONG = [("jax_training", "all_reduce")]


def run(rank: Rank, program: str, number: int) -> str:
    return run_launched(rank, FOLDER / f"{program}.py", number)


def run_with_a_wrong_number(rank: Rank, program: str, verb: str, number: int) -> Attempt:
    """Run a program in which one number of the inputs of one verb is 1 too large."""
    from fastcoll import jax

    right = getattr(jax, verb)

    def wrong(x: Any, *args: Any, **options: Any) -> Any:
        return right(x.at[(0,) * x.ndim].add(1), *args, **options)

    with mock.patch.object(jax, verb, wrong):
        return attempt(run, rank, program, number)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", OF_JAX)
def test_the_example_runs(fresh_pool: Callable[..., Pool], program: str, num_ranks: int) -> None:
    pool = fresh_pool(num_ranks, Setup(init=False))
    printed = pool.run(run, program, next(NUMBERS), deadline_s=COMPILE_S)
    assert sum("Look at:" in text for text in printed) == 1, printed


@pytest.mark.long
@pytest.mark.parametrize(("program", "verb"), WRONG)
def test_the_example_sees_a_wrong_number(
    fresh_pool: Callable[..., Pool], program: str, verb: str
) -> None:
    pool = fresh_pool(2, Setup(init=False))
    number = next(NUMBERS)
    attempts = pool.run(run_with_a_wrong_number, program, verb, number, deadline_s=COMPILE_S)
    assert any(one.kind == "AssertionError" for one in attempts), attempts


def test_every_example_is_held_to_its_result() -> None:
    assert {program for program, _ in WRONG} == set(OF_JAX)
