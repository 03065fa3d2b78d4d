# SPDX-License-Identifier: Apache-2.0
"""The operators as compiled code calls them: their bodies, and torch.ops where that is needed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastcoll.integrations import ops
from tests.support.backends import on_backend
from tests.support.harness import Rank, attempt

NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_reduce_rms_norm")
ROWS = 4  # and 4 columns: each operator takes the transpose, too


class Seeing(TorchDispatchMode):
    """Notes the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note one, and run it."""
        del types
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def ways() -> tuple[Any, Any]:
    """Return the operators as plain functions, and as torch.ops has them."""
    operators = {name: getattr(torch.ops.fastcoll, name).default for name in NAMES}
    return getattr(torch.ops.fastcoll, ops.DIRECT), SimpleNamespace(**operators)


def arguments_of(name: str, x: Tensor) -> tuple[Any, ...]:
    """Return arguments of an operator on the default group."""
    more: dict[str, tuple[Any, ...]] = {
        "all_gather": ("",),
        "all_reduce_rms_norm": (x, None, 7.0, 0.0, False, False, 0, ""),
    }
    return (x, *more.get(name, (0, "")))


def compare(rank: Rank, name: str) -> list[bool]:
    """Return whether a direct call is what torch.ops gives, in each way of being watched."""
    direct, boxed = (getattr(way, name) for way in ways())
    x = torch.full((ROWS, ROWS), rank.rank + 1.0)
    plain = same(direct(*arguments_of(name, x)), boxed(*arguments_of(name, x)))
    with Seeing() as mode:
        direct(*arguments_of(name, x))
    with torch.profiler.profile() as profile:
        direct(*arguments_of(name, x))
    events = {event.key for event in profile.key_averages()}
    gradients = []
    for call in (direct, boxed):
        leaf = x.clone().requires_grad_()
        result = call(*arguments_of(name, leaf))
        first = result if isinstance(result, Tensor) else result[0]
        first.square().sum().backward()
        gradients.append(leaf.grad)
    with torch.no_grad():
        result = direct(*arguments_of(name, leaf))
    without = result if isinstance(result, Tensor) else result[0]
    batch = torch.stack([x, x + 1])
    mapped = [
        torch.vmap(lambda one, call=call: call(*arguments_of(name, one)))(batch)
        for call in (direct, boxed)
    ]
    shapes = [shape_of(call(*arguments_of(name, x.to("meta")))) for call in (direct, boxed)]
    return [
        plain,
        f"{name}.default" in mode.seen,
        f"fastcoll::{name}" in events,
        torch.equal(*gradients),
        not without.requires_grad,
        same(*mapped),
        shapes[0] == shapes[1],
        same(direct(*arguments_of(name, x.t())), boxed(*arguments_of(name, x.t()))),
    ]


def shape_of(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.device.type, result.shape
    return [shape_of(one) for one in result]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return len(one) == len(other) and all(map(same, one, other))


@pytest.mark.parametrize("name", NAMES)
def test_a_direct_call_is_the_operators(backend_pools: Any, name: str) -> None:
    rows = backend_pools(2).run(on_backend, "fastcoll", compare, name)
    assert rows == [[True] * 8] * 2


def texts_of_mistakes(rank: Rank) -> list[tuple[str, str]]:
    """Return the errors of direct calls, and of torch.ops, with arguments that do not fit."""
    del rank
    x = torch.ones(ROWS)
    mistakes: list[Callable[[Any], Any]] = [
        lambda way: way.all_reduce(x, "sum", ""),
        lambda way: way.all_reduce(x, 0),
        lambda way: way.all_reduce(x, 1 << 70, ""),
        lambda way: way.all_reduce([1.0], 0, ""),
        lambda way: way.all_reduce(x, 0, "gone"),
        lambda way: way.reduce_scatter(torch.ones(3), 0, ""),
    ]
    direct, boxed = ways()
    return [(attempt(one, direct).text, attempt(one, boxed).text) for one in mistakes]


def test_mistakes_have_the_operators_texts(backend_pools: Any) -> None:
    for rows in backend_pools(2).run(on_backend, "fastcoll", texts_of_mistakes):
        assert [text for text, _ in rows] == [text for _, text in rows]
        assert all(text for text, _ in rows)


def code_of_program(rank: Rank) -> tuple[bool, str]:
    """Compile a program; return whether it is right, and its code."""
    from torch._inductor.utils import run_and_get_code

    def program(x: Tensor) -> Tensor:
        return ops.all_reduce(x + 1) * 2

    x = torch.full((ROWS,), rank.rank + 1.0)
    result, [code] = run_and_get_code(torch.compile(program), x)
    return torch.equal(result, torch.full((ROWS,), 10.0)), code


@pytest.mark.slow
def test_compiled_code_calls_directly(backend_pools: Any) -> None:
    run = backend_pools(2).run
    for is_right, code in run(on_backend, "fastcoll", code_of_program, deadline_s=200):
        assert is_right
        assert "torch.ops.fastcoll.direct.all_reduce(" in code
        assert "fastcoll.all_reduce.default" not in code.replace("#", "")


def kind_of_direct(rank: Rank) -> str:
    del rank
    return type(ways()[0].all_reduce).__name__


def test_the_compiled_backend_has_functions_of_its_own(
    compiled_pools: Any, bare_pools: Any
) -> None:
    kinds = {"builtin_function_or_method": compiled_pools, "OpOverload": bare_pools}
    for kind, pools in kinds.items():
        assert pools(2).run(on_backend, "fastcoll", kind_of_direct) == [kind] * 2
