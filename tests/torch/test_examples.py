# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/: each runs, prints what to look at, and fails if a result is wrong.

The ranks are a pool's, as `support/launched.py` says. One example is started by torchrun itself.
"""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fastcoll
from tests.proofs import LIBRARY
from tests.support.harness import Attempt, Rank, Setup, attempt
from tests.support.launched import NUMBERS, run_launched
from tests.support.programs import run_python

pytestmark = pytest.mark.proof(*LIBRARY, "examples")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py"))
OF_JAX = [program for program in EXAMPLES if program.startswith("jax_")]  # jax/test_jax_examples.py
PROGRAMS = [program for program in EXAMPLES if program not in OF_JAX]


def run(rank: Rank, program: str, number: int) -> str:
    return run_launched(rank, FOLDER / f"{program}.py", number)


def check_on(pools: Any, world_size: int, program: str) -> None:
    printed = pools(world_size).run(run, program, next(NUMBERS))
    assert sum("Look at:" in text for text in printed) == 1, printed


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_example_runs(bare_pools: Any, program: str) -> None:
    check_on(bare_pools, 2, program)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_example_runs_on_three_ranks(bare_pools: Any, program: str) -> None:
    check_on(bare_pools, 3, program)


# The calls in which a wrong number must make a program fail. pitfalls.py is about calls that fail,
# and compares its one result with itself.
VERBS = ["all_reduce", "reduce", "reduce_scatter_tensor", "broadcast", "all_gather_into_tensor"]
VERBS += ["gather", "scatter", "all_to_all_single"]
WRONG = [("verbs", verb) for verb in VERBS] + [
    ("mean", "all_reduce"),
    ("argmax", "broadcast"),
    ("ring_all_reduce", "recv"),
    ("softmax", "all_reduce"),
    ("ddp_by_hand", "all_reduce"),
    ("zero", "reduce_scatter_tensor"),
    ("zero", "all_gather_into_tensor"),
    ("tensor_parallel", "all_reduce"),
    ("experts", "all_to_all_single"),
    ("embedding", "all_to_all_single"),
    ("pipeline", "recv"),
    ("parameter_server", "broadcast"),
    ("parameter_server", "gather"),
    ("actor_learner", "broadcast"),
    ("actor_learner", "gather"),
    ("elastic", "all_reduce"),
    ("elastic", "broadcast"),
]
# Where the tensor that a call reads is among its arguments; of a list, the first is taken.
INPUT = {verb: 1 for verb in VERBS if verb.startswith(("reduce_scatter", "all_gather", "all_to"))}
INPUT["scatter"] = 1


def run_with_a_wrong_number(rank: Rank, program: str, verb: str, number: int) -> Attempt:
    """Run a program in which one number of one verb's inputs, or of what came, is 1 too large."""
    right = getattr(fastcoll, verb)

    def wrong(*args: Any, **options: Any) -> Any:
        def spoil(given: Any) -> None:
            tensor = given[0] if isinstance(given, list) else given
            if tensor is not None and tensor.numel():
                with torch.no_grad():
                    tensor.view(-1)[0] += 1

        where = args[INPUT.get(verb, 0)]
        if verb != "recv":
            spoil(where)
        result = right(*args, **options)
        if verb == "recv":
            spoil(where)
        return result

    with mock.patch.object(fastcoll, verb, wrong):
        return attempt(run, rank, program, number)


@pytest.mark.parametrize(("program", "verb"), WRONG)
def test_the_example_sees_a_wrong_number(bare_pools: Any, program: str, verb: str) -> None:
    attempts = bare_pools(2).run(run_with_a_wrong_number, program, verb, next(NUMBERS))
    # Those that noticed nothing themselves lose a peer, or are through already.
    assert any(one.kind in ("AssertionError", "RuntimeError") for one in attempts), attempts


def test_every_example_is_held_to_its_result_and_in_the_readme() -> None:
    assert {program for program, _ in WRONG} | {"pitfalls"} == set(PROGRAMS)
    rows = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(rows) == EXAMPLES


@pytest.mark.slow
def test_the_pitfalls_name_what_differs(bare_pools: Any) -> None:
    text, *_ = bare_pools(2).run(run, "pitfalls", next(NUMBERS))
    for word in ("float16", "float32", "all_reduce", "barrier", "CollectiveTimeout"):
        assert word in text


def run_and_be_killed(rank: Rank, number: int) -> str:
    with mock.patch.object(sys, "argv", ["elastic.py", "--kill"]):
        return run(rank, "elastic", number)


@pytest.mark.long
def test_training_goes_on_after_a_kill(fresh_pool: Any) -> None:
    outcomes = fresh_pool(3, Setup(init=False)).outcomes(run_and_be_killed, next(NUMBERS))
    assert outcomes[2].exit_code == -signal.SIGKILL
    assert "2 of 3 ranks go on at step 20" in outcomes[0].value
    assert outcomes[1].ok, outcomes[1].describe()


@pytest.mark.slow
def test_torchrun_itself(tmp_path: Path) -> None:
    options = ("--standalone", "--nproc-per-node=2", FOLDER / "argmax.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_python("-m", "torch.distributed.run", *options, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Look at:" in done.stdout
