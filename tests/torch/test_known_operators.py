# SPDX-License-Identifier: Apache-2.0
"""The operators of fastcoll where the compiled backend runs them, without Python."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastcoll
from fastcoll.integrations import graph_names, ops  # noqa: F401 - makes torch.ops.fastcoll
from fastcoll.types import Op
from tests.support.backends import on_backend, renew_group
from tests.support.harness import Attempt, Rank, attempt

SUM = dist.ReduceOp.SUM


@contextlib.contextmanager
def entering(entered: list[str]) -> Iterator[None]:
    """Append the functions of fastcoll that Python enters, but for what a long wait calls."""

    def enter(frame: Any, event: str, arg: object) -> None:
        del arg
        name = frame.f_code.co_qualname
        is_ours = "fastcoll" in str(frame.f_globals.get("__name__"))
        if event == "call" and is_ours and name != "_listen":
            entered.append(name)

    sys.setprofile(enter)
    try:
        yield
    finally:
        sys.setprofile(None)


# Autograd has a say in the calls on tensors that were made outside of inference mode.
MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "no leaf": contextlib.nullcontext,
}


def python_of_known_calls(rank: Rank, mode: str, is_default: bool) -> tuple[bool, list[str]]:
    """Call the operators of a group twice; return the functions that Python entered."""
    group = None if is_default else dist.new_group()
    name, total = graph_names.name_of(group), graph_names.code_of(SUM)
    calls: list[Callable[[Tensor], Any]] = [
        lambda x: torch.ops.fastcoll.all_reduce(x, total, name),
        lambda x: torch.ops.fastcoll.reduce_scatter(x, total, name),
        lambda x: torch.ops.fastcoll.all_gather(x, name),
        lambda x: torch.ops.fastcoll.all_reduce_rms_norm(
            x, x, None, 7.0, 0.0, False, False, total, name
        ),
    ]
    entered: list[str] = []
    with MODES[mode]():
        x = torch.full((4, 3), rank.rank + 1.0, requires_grad=mode == "no_grad")
        first = [call(x) for call in calls]
        with entering(entered):
            again = [call(x) for call in calls]
    summed = x + 3.0
    right = [
        x.new_full((4, 3), 3.0),
        x.new_full((2, 3), 3.0),
        torch.cat([x.new_full((4, 3), 1.0), x.new_full((4, 3), 2.0)]),
        [summed * torch.rsqrt(summed.square() + 7.0), summed],
    ]
    return all(map(close, first + again, right + right)), entered


def close(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.allclose(one, other, rtol=1e-6)
    return all(map(close, one, other))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_default", [False, True])
def test_known_operators_need_no_python(
    compiled_pools: Any, bare_pools: Any, mode: str, is_default: bool
) -> None:
    program = on_backend, "fastcoll", python_of_known_calls, mode, is_default
    for right, entered in compiled_pools(2).run(*program):
        assert right
        assert entered == []
    for right, entered in bare_pools(2).run(*program):
        assert right
        # the probe sees the calls of the Python backend
        assert {"_all_reduce", "define.<locals>.run"} <= set(entered)


def operators_of_groups_that_end(rank: Rank) -> list[str]:
    """Use a group, close it, and use it again; then the next default group by the same name."""
    seen = []
    x = torch.full((3,), rank.rank + 1.0)
    group = fastcoll.new_group()
    name, total = graph_names.name_of(group), graph_names.code_of(SUM)
    seen.append(str(torch.ops.fastcoll.all_reduce(x, total, name).tolist()))
    group.close()
    seen.append(attempt(torch.ops.fastcoll.all_reduce, x, total, name).kind)
    del group
    seen.append(attempt(torch.ops.fastcoll.all_reduce, x, total, name).kind)
    seen.append(str(torch.ops.fastcoll.all_reduce(x, total, "").tolist()))
    fastcoll.destroy()
    fastcoll.init(dist.group.WORLD)
    seen.append(str(torch.ops.fastcoll.all_reduce(x, total, "").tolist()))
    return seen


def test_operators_of_groups_that_end(backend_pools: Any) -> None:
    sums = "[3.0, 3.0, 3.0]"
    for seen in backend_pools(2).run(on_backend, "gloo", operators_of_groups_that_end):
        assert seen == [sums, "UsageError", "UsageError", sums, sums]


# Cut to a byte or to an int, the last three are 0: the number of SUM.
NO_REDUCTIONS = (len(Op), -1, 1 << 8, 1 << 16, 1 << 32)


def numbers_that_name_no_reduction(rank: Rank) -> list[tuple[int, list[Attempt]]]:
    """Call the operators that reduce once rightly, so that the call is known, then wrongly."""
    name, x = graph_names.name_of(dist.new_group()), torch.full((4, 3), rank.rank + 1.0)
    operators: list[Callable[[int], Any]] = [
        lambda number: torch.ops.fastcoll.all_reduce(x, number, name),
        lambda number: torch.ops.fastcoll.reduce_scatter(x, number, name),
        lambda number: torch.ops.fastcoll.all_reduce_rms_norm(
            x, None, None, 7.0, 0.0, False, False, number, name
        ),
    ]
    for operator in operators:
        operator(0)
    return [
        (number, [attempt(operator, number) for operator in operators]) for number in NO_REDUCTIONS
    ]


def test_a_number_that_names_no_reduction_is_refused(backend_pools: Any) -> None:
    for seen in backend_pools(2).run(on_backend, "fastcoll", numbers_that_name_no_reduction):
        for number, attempts in seen:
            for one in attempts:
                assert one.kind == "UsageError", (number, one)
                assert f"no reduction has the number {number}: it is one of 0 (SUM)" in one.text


def sum_or_error(name: str, x: Tensor) -> str:
    results: list[Tensor] = []

    def call() -> None:
        results.append(torch.ops.fastcoll.all_reduce(x, 0, name))

    return attempt(call).kind or str(results[0].tolist())


def operators_by_torchs_name(rank: Rank) -> list[str]:
    """Use the name of a group of torch's while it is one of fastcoll, another one, one of Gloo."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    x, seen, alive = torch.full((3,), rank.rank + 1.0), [], []
    for turn, backend in enumerate(("fastcoll", "fastcoll", "gloo")):
        if turn:
            renew_group(rank, backend)
        seen += [sum_or_error(f"torch:{name}", x) for _ in range(2)]
        if backend == "fastcoll":
            alive.append(graph_names.named(f"torch:{name}"))  # also when it is closed
    return seen


def test_a_name_of_torchs_is_the_group_that_has_it_now(backend_pools: Any) -> None:
    sums = "[3.0, 3.0, 3.0]"
    for seen in backend_pools(2).run(on_backend, "fastcoll", operators_by_torchs_name):
        assert seen == [sums] * 4 + ["UsageError"] * 2
