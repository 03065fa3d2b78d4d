# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""The operator `fastcoll::all_reduce_rms_norm`: a sum, and the norm of its rows behind it.

Decides its schema, its gradient and its rule for batches. It returns a list, as Inductor's
collectives have one result or a list. It has no derivative forwards, and says so. `ops.py` has the
function for programs, and names the groups.
"""

from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from fastcoll.calls.group import BaseGroup
from fastcoll.calls.rows import RMSNorm
from fastcoll.calls.tensors import reduction_numbered
from fastcoll.errors import UnsupportedError

NAME = "all_reduce_rms_norm"
SCHEMA = (
    f"{NAME}(Tensor x, Tensor? residual, Tensor? weight, float eps, float offset, "
    "bool rounds_first, bool wide_sum, int op, str group) -> Tensor[]"
)
Pair: TypeAlias = list[Tensor]  # the normalised rows, and the sums with the residual
Run: TypeAlias = Callable[..., Pair]


def define(library: torch.library.Library, named: Callable[[str], BaseGroup]) -> tuple[Run, Run]:
    """Define the operator; `named` returns the group of a name.

    Return its function, and what autograd runs in its place.
    """

    def run(x: Tensor, residual: Tensor | None, weight: Tensor | None, *terms: Any) -> Pair:
        eps, offset, rounds_first, wide_sum, op, group = terms
        normed, summed = fake(x)
        norm = RMSNorm(
            None if weight is None else weight.contiguous(),
            eps,
            residual=None if residual is None else residual.contiguous(),
            summed=summed,
            offset=offset,
            rounds_first=rounds_first,
            wide_sum=wide_sum,
        )
        named(group).all_reduce(x, reduction_numbered(op), out=normed, then=norm)
        return [normed, summed]

    def fake(x: Tensor, *terms: object) -> Pair:
        del terms
        return [x.new_empty(x.shape), x.new_empty(x.shape)]

    library.define(SCHEMA)
    library.impl(NAME, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastcoll::{NAME}", fake, lib=library)
    operator = getattr(torch.ops.fastcoll, NAME).default
    gradient = _with_gradient(operator)
    library.impl(NAME, gradient, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"fastcoll::{NAME}", _batched(operator), lib=library)
    torch.library._register_effectful_op(
        f"fastcoll::{NAME}", torch.library.EffectType.ORDERED, lib=library
    )
    return run, gradient


def _with_gradient(operator: Any) -> Callable[..., Pair]:
    """Return the function that autograd runs in place of the operator."""

    class Differentiable(_SingleLevelFunction):
        @staticmethod
        def forward(keys: Any, *terms: Any) -> tuple[Tensor, Tensor]:
            # As in derivatives.py: an outer transform may want derivatives of its own.
            rest = keys & torch._C._after_autograd_keyset
            below = torch._C._AutoDispatchBelowAutograd()
            with below, torch.enable_grad(), _set_fwd_grad_enabled(True):
                normed, summed = operator.redispatch(rest, *terms)
            return normed, summed

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            _, _, _, weight, ctx.eps, ctx.offset, _, _, ctx.op, ctx.group = inputs
            ctx.save_for_backward(output[1], weight)

        @staticmethod
        def backward(ctx: Any, of_normed: Tensor, of_summed: Tensor) -> tuple[Tensor | None, ...]:
            summed, weight = ctx.saved_tensors
            _, _, wants_residual, wants_weight = ctx.needs_input_grad[:4]
            wide, of_row = summed.float(), of_normed.float()
            inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
            unit = wide * inverse
            scaled = of_row * (ctx.offset + (1.0 if weight is None else weight.float()))
            mean = (unit * scaled).mean(-1, keepdim=True)
            of_sum = ((scaled - unit * mean) * inverse + of_summed).to(summed.dtype)
            of_x = torch.ops.fastcoll.all_reduce(of_sum, ctx.op, ctx.group)
            of_weight = None
            if wants_weight:
                of_weight = (of_row * unit).flatten(0, -2).sum(0).to(weight.dtype)
            of_residual = of_sum if wants_residual else None
            return None, of_x, of_residual, of_weight, *[None] * 6

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> NoReturn:
            raise UnsupportedError(
                f"{NAME} has no forward derivative; take all_reduce and a norm of torch"
            )

    apply: Callable[..., tuple[Tensor, Tensor]] = Differentiable.apply  # type: ignore[attr-defined]

    def run(keys: Any, *terms: Any) -> Pair:
        if not _wants_derivatives(terms[:3]):
            with torch._C._AutoDispatchBelowAutograd():
                pair: Pair = operator.redispatch(keys & torch._C._after_autograd_keyset, *terms)
            return pair
        with enable_single_level_autograd_function():
            return [*apply(keys, *terms)]

    return run


def _wants_derivatives(tensors: tuple[Tensor | None, ...]) -> bool:
    """Return whether a derivative can be asked for: torch's function for one costs tens of us."""
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def _batched(operator: Any) -> Callable[..., tuple[Pair, list[int]]]:
    """Return the function by which the operator takes all examples of a batch, as further rows."""

    def first(info: Any, tensor: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return tensor.expand(info.batch_size, *tensor.shape)
        return tensor.movedim(dim, 0)

    def run(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        *terms: Any,
    ) -> tuple[Pair, list[int]]:
        if in_dims[2] is not None:
            raise UnsupportedError(f"{NAME} takes one weight for all examples of a batch")
        added = None if residual is None else first(info, residual, in_dims[1])
        return operator(first(info, x, in_dims[0]), added, weight, *terms), [0, 0]

    return run
