# SPDX-License-Identifier: Apache-2.0
"""Arguments that no epilogue can have: each is refused with a way out, and the group goes on.

The tensors lie on a GPU made of the CPU (support/fake_gpu.py).
"""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import fastcoll
from tests.support.gpu import needs_gpu_part
from tests.support.harness import Attempt, Pools, Rank, attempt
from tests.support.programs import run_python
from tests.support.sites import group_on_fake_gpu

pytestmark = [needs_gpu_part, pytest.mark.long]


def then_of(name: str, args: Any = (2.0,), by_rows: bool = False) -> Any:
    from tests.triton import users_epilogue

    return fastcoll.TritonEpilogue(getattr(users_epilogue, name), args, by_rows)


def over_itself(comm: Any) -> Any:
    x = torch.ones(8)
    return comm.all_reduce(x, then=then_of("times", (x[4:],)))


def on_another_gpu(comm: Any) -> Any:
    from fastcoll.calls import arrays

    far, seen = torch.ones(4), arrays._view_tensor

    def view(tensor: Any, name: str, gpu: bool) -> Any:
        found = seen(tensor, name, gpu)
        return dataclasses.replace(found, device=1) if tensor is far else found

    with mock.patch.object(arrays, "_view_tensor", view):
        return comm.all_reduce(torch.ones(4), then=then_of("times", (far,)))


# name -> the call, the class, and words of the text
REFUSED: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "no function of Triton's": (
        lambda c: fastcoll.TritonEpilogue(len),
        "UsageError",
        "must be a @triton.jit function (value, index, mask, row, args), not <built-in",
    ),
    "too few parameters": (
        lambda c: then_of("of_four"),
        "UsageError",
        "takes (value, index, mask, args); it needs 5 parameters",
    ),
    "a list": (lambda c: then_of("times", [1.0]), "UsageError", "args must be a tuple, not list"),
    "an array": (
        lambda c: then_of("times", (1.0, np.ones(2))),
        "UsageError",
        "args[1] must be a tensor or a number, not ndarray",
    ),
    "another class": (
        lambda c: c.all_reduce(torch.ones(4), then=len),
        "UsageError",
        "RMSNorm or a fastcoll.TritonEpilogue, not builtin_function",
    ),
    "a norm": (
        lambda c: c.all_reduce(torch.ones(4, 4), then=fastcoll.RMSNorm()),
        "UnsupportedError",
        "on a GPU give a fastcoll.TritonEpilogue",
    ),
    "complex numbers": (
        lambda c: c.all_reduce(torch.ones(4, dtype=torch.complex64), then=then_of("times")),
        "UnsupportedError",
        "takes real numbers, not complex64",
    ),
    "no rows": (
        lambda c: c.all_reduce(torch.tensor(1.0), then=then_of("below_largest", by_rows=True)),
        "UsageError",
        "tensor of shape () has no rows",
    ),
    "no columns": (
        lambda c: c.all_reduce(torch.ones(4, 0), then=then_of("below_largest", by_rows=True)),
        "UsageError",
        "has no rows",
    ),
    "long rows": (
        lambda c: c.all_reduce(
            torch.ones((1 << 20) + 1), then=then_of("below_largest", by_rows=True)
        ),
        "UnsupportedError",
        "rows of 1048577 elements",
    ),
    "integers of floats": (
        lambda c: c.all_reduce(
            torch.ones(4), out=torch.ones(4, dtype=torch.int32), then=then_of("times")
        ),
        "UsageError",
        "they need one dtype",
    ),
    "an argument over the output": (over_itself, "UsageError", "args[0] of then overlaps tensor"),
    "an argument elsewhere": (on_another_gpu, "UsageError", "args[0] of then on cuda:1"),
    "a meta tensor": (
        lambda c: c.all_reduce(torch.ones(4), then=then_of("times", (torch.ones(4).to("meta"),))),
        "UnsupportedError",
        "args[0] of then is a meta tensor",
    ),
}


def refuse_all(rank: Rank) -> tuple[dict[str, Attempt], Attempt, list[Any], list[float]]:
    on_cpu = attempt(rank.comm.all_reduce, torch.ones(4), then=then_of("times"))
    with group_on_fake_gpu(rank) as (comm, core):
        found = {name: attempt(row[0], comm) for name, row in REFUSED.items()}
        log = list(core.log)
        comm.all_reduce(probe := torch.ones(2))
        return found, on_cpu, log, probe.tolist()


def test_what_does_not_fit_is_refused_and_does_no_harm(triton_pools: Pools) -> None:
    for found, on_cpu, log, probe in triton_pools(2).run(refuse_all):
        assert log == [], "something was launched"
        assert probe == [2.0, 2.0]
        assert on_cpu.kind == "UnsupportedError"
        assert (
            "runs on GPUs, and the tensors are on the CPU: give a fastcoll.RMSNorm" in on_cpu.text
        )
        for name, (_, kind, text) in REFUSED.items():
            assert (name, found[name].kind) == (name, kind)
            assert text in found[name].text, name


def test_a_program_without_triton_is_told_what_a_function_is() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import fastcoll\n"
        "try:\n    fastcoll.TritonEpilogue(len)\n"
        "except fastcoll.UsageError as error:\n    print(error)\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "must be a @triton.jit function" in done.stdout
