# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call, no-untyped-def"
"""Derivatives and batches of the operators of `ops.py`.

Decides each operator's tangent, how it takes the examples of a batch at once, and how both and its
gradient go together. With `torch.library.register_autograd` an operator has a gradient alone. Its
tangent is taken for zero without a word, and it can't stand inside of torch.func's transforms.

All operators are linear, but for reductions other than SUM and AVG. So the tangent is the same
collective of the tangent. Must not know groups.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.types import Op

_LINEAR = (int(Op.SUM), int(Op.AVG))
_CUT_BY_ROWS = ("all_gather", "reduce_scatter", "all_to_all")
_Operator = Callable[..., Tensor]
# From the gradient of a result and the operator's other arguments.
Gradient = Callable[..., Tensor]


def register(library: torch.library.Library, name: str, gradient: Gradient) -> _Operator:
    """Give an operator of `library` its derivatives and its rule for batches.

    Return what autograd runs in its place.
    """
    operator = getattr(torch.ops.fastcoll, name).default
    run = _with_derivatives(operator, name, gradient)
    library.impl(name, run, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"fastcoll::{name}", _batched(operator, name), lib=library)
    return run


# ---- derivatives ---------------------------------------------------------------------------------


def _with_derivatives(operator: Any, name: str, gradient: Gradient) -> _Operator:
    """Return the function that autograd runs in place of an operator.

    torch.func's dispatch calls it for one of its levels, and needs the derivatives of that level
    alone.
    """

    def check(terms: Any) -> None:
        if name in ("all_reduce", "reduce_scatter") and terms[0] not in _LINEAR:
            raise UnsupportedError(
                f"{name}({Op(terms[0]).name}) has no derivative here; SUM and AVG have"
            )

    class Differentiable(_SingleLevelFunction):
        @staticmethod
        def forward(keys: Any, x: Tensor, *terms: Any) -> Tensor:
            # torch has switched derivatives off, and an outer transform may want its own.
            rest = keys & torch._C._after_autograd_keyset
            below = torch._C._AutoDispatchBelowAutograd()
            with below, torch.enable_grad(), _set_fwd_grad_enabled(True):
                return cast(Tensor, operator.redispatch(rest, x, *terms))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            _, _, *ctx.terms = inputs

        @staticmethod
        def backward(ctx: Any, of_result: Tensor) -> tuple[Tensor | None, ...]:
            check(ctx.terms)
            return None, gradient(of_result, *ctx.terms), *[None for _ in ctx.terms]

        @staticmethod
        def jvp(ctx: Any, keys: None, tangent: Tensor, *terms: None) -> Tensor:
            check(ctx.terms)
            return cast(Tensor, operator(tangent, *ctx.terms))

    apply: _Operator = Differentiable.apply  # type: ignore[attr-defined]

    def run(keys: Any, x: Tensor, *terms: Any) -> Tensor:
        with enable_single_level_autograd_function():
            return apply(keys, x, *terms)

    return run


# ---- batches -------------------------------------------------------------------------------------


def _batched(operator: _Operator, name: str) -> Callable[..., tuple[Tensor, int]]:
    """Return the function by which an operator takes all examples of a batch in one call.

    They lie side by side in each element, or in each row where the operator cuts and joins rows.
    """
    place = 1 if name in _CUT_BY_ROWS else 0

    def run(info: Any, in_dims: tuple[int, ...], x: Tensor, *terms: Any) -> tuple[Tensor, int]:
        if x.dim() == place:
            raise UsageError(f"{name}(): a tensor without dimensions has no rows")
        return operator(x.movedim(in_dims[0], place), *terms), place

    return run
