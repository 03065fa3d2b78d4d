# SPDX-License-Identifier: Apache-2.0
"""The chain behind a sum in a graph of torch's compiler: addition of a residual, and RMSNorm.

Decides which nodes are such a chain. Each step has the dtype, the shape and the reading order that
the operator of `row_ops.py` has; whatever differs is no chain. No step has a reader outside of the
chain, but for the sum with its residual and the result. Nothing here asks for a guard: sizes that
are not known to be equal are different. Must not know how a chain is replaced, or that of a sum.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

aten, prims = torch.ops.aten, torch.ops.prims
_FP32 = torch.float32
_ROW_DTYPES = (_FP32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Norm:
    """An RMSNorm of a graph."""

    eps: float
    steps: tuple[fx.Node, ...]  # all its nodes, in their order; the last one is its result
    weight: fx.Node | None = None
    offset: float = 0.0
    rounds_first: bool = False
    wide_sum: bool = False

    @property
    def out(self) -> fx.Node:
        return self.steps[-1]


@dataclass(frozen=True)
class Chain:
    """The nodes behind a sum: the addition of a residual, if there is one, and a norm."""

    plain: fx.Node  # the sum
    # The sum with the residual; without one the plain sum. None: nobody reads it.
    summed: fx.Node | None
    residual: fx.Node | None
    added: tuple[fx.Node, ...]  # the nodes between the plain sum and the norm, in their order
    norm: Norm

    @property
    def steps(self) -> tuple[fx.Node, ...]:
        """The nodes behind the plain sum; each stands behind those that it reads."""
        is_rounded = self.summed in (None, self.plain, *self.added)
        last = () if is_rounded or self.summed is None else (self.summed,)
        return (*self.added, *self.norm.steps, *last)

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised rows and the sum, as the compiler knows them."""
        summed = self.plain if self.summed is None else self.summed
        return self.norm.out.meta["val"], summed.meta["val"]

    @property
    def read(self) -> list[fx.Node]:
        """The tensors besides the plain sum."""
        return [one for one in (self.residual, self.norm.weight) if one is not None]


def find_chain(plain: fx.Node) -> Chain | None:
    """Return the chain behind a sum, if there is one."""
    value = _value(plain)
    if value is None or value.dtype not in _ROW_DTYPES or value.device.type != "cpu":
        return None
    if value.dim() == 0 or not statically_known_true(value.shape[-1] > 0):
        return None
    chain = _wide_chain(plain, value.dtype) or _chain(plain, value.dtype)
    # The operator's results are dense, and a later view of the graph may rely on other strides.
    if chain is None or not all(map(_is_dense, chain.results)):
        return None
    return chain


def _chain(plain: fx.Node, dtype: torch.dtype) -> Chain | None:
    summed, residual = _added(plain) or (plain, None)
    norm = _norm_of(summed, dtype)
    added = () if residual is None else (summed,)
    return None if norm is None else Chain(plain, summed, residual, added, norm)


def _wide_chain(plain: fx.Node, dtype: torch.dtype) -> Chain | None:
    """Return a chain as vLLM's, whose norm reads the sum with the residual before its rounding."""
    wide = _only(plain, prims.convert_element_type.default)
    total = _only(wide, aten.add.Tensor) if wide and _is_conversion(wide, _FP32) else None
    if wide is None or total is None or total.kwargs or dtype is _FP32:
        return None
    other = _other(total, wide)
    if other is None or not _is_conversion(other, _FP32):
        return None
    residual = other.args[0]
    if not isinstance(residual, fx.Node) or not _is_like(residual, plain):
        return None
    norm = _norm_from(total, dtype) if _is_like(total, wide) else None
    rounded = [one for one in total.users if _is_conversion(one, dtype)]
    if norm is None or len(rounded) > 1 or not {*total.users} <= {*rounded, *norm.steps}:
        return None
    norm = Norm(**{**vars(norm), "wide_sum": True})
    summed = rounded[0] if rounded else None
    return Chain(plain, summed, residual, (wide, total), norm)


def _added(plain: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the addition of a residual, which alone reads the plain sum, and the residual."""
    total = _only(plain, aten.add.Tensor)
    if total is None or total.kwargs:
        return None
    other = _other(total, plain)
    if other is None or not _is_like(other, plain) or not _is_like(total, plain):
        return None
    return total, other


def _norm_of(summed: fx.Node, dtype: torch.dtype) -> Norm | None:
    """Return a norm that reads the sums; others may read them too."""
    if dtype is _FP32:
        return _norm_from(summed, dtype)
    for wide in summed.users:
        if _is_conversion(wide, _FP32):
            found = _norm_from(wide, dtype)
            if found is not None and {*wide.users} <= {*found.steps}:
                return Norm(**{**vars(found), "steps": (wide, *found.steps)})
    return None


def _norm_from(wide: fx.Node, dtype: torch.dtype) -> Norm | None:
    """Return the norm of values in fp32, whose result has the dtype."""
    last = len(_value(wide).shape) - 1  # type: ignore[union-attr]
    for square in wide.users:
        mean = _only(square, aten.mean.dim) if _is_square(square, wide) else None
        if mean is None or mean.kwargs or [*mean.args[1:]] not in ([[-1], True], [[last], True]):
            continue
        biased = _only(mean, aten.add.Tensor, aten.add.Scalar)
        if biased is None or biased.kwargs or not _is_eps(biased.args[1]):
            continue
        inverse = _only(biased, aten.rsqrt.default)
        normed = inverse and _only(inverse, aten.mul.Tensor)
        if inverse is None or normed is None or {*normed.args} != {wide, inverse}:
            continue
        steps = (square, mean, biased, inverse, normed)
        if all(_dtype(step) is _FP32 for step in steps):
            return _scaled(steps, dtype, float(biased.args[1]))  # type: ignore[arg-type]
    return None


def _is_square(node: fx.Node, wide: fx.Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 2)
    return node.target is aten.mul.Tensor and node.args == (wide, wide)


def _is_eps(number: Any) -> bool:
    """Return whether `RMSNorm` takes this as its eps."""
    return isinstance(number, float) and 0 <= number < float("inf")


def _scaled(steps: tuple[fx.Node, ...], dtype: torch.dtype, eps: float) -> Norm | None:
    """Return the norm with its weight: torch's, Hugging Face's or Gemma's; or without one."""
    rows = steps[-1]
    if dtype is _FP32:
        return _weighted(steps, eps, dtype) or Norm(eps, steps)
    if (rounded := _only(rows, prims.convert_element_type.default)) is not None:
        if not _is_conversion(rounded, dtype):
            return None
        steps = (*steps, rounded)
        return _weighted(steps, eps, dtype, rounds_first=True) or Norm(eps, steps)
    if (wide := _weighted(steps, eps, _FP32)) is None:
        return None
    last = _only(wide.out, prims.convert_element_type.default)
    if last is None or not _is_conversion(last, dtype):
        return None
    return Norm(**{**vars(wide), "steps": (*wide.steps, last)})


def _weighted(
    steps: tuple[fx.Node, ...], eps: float, dtype: torch.dtype, *, rounds_first: bool = False
) -> Norm | None:
    """Return the norm whose rows are then multiplied by a weight, with a result of the dtype."""
    rows = steps[-1]
    out = _only(rows, aten.mul.Tensor)
    factor = out and _other(out, rows)
    if out is None or factor is None or _dtype(out) is not dtype:
        return None
    weight, offset = _without_offset(factor)
    value, columns = _value(weight), _value(rows).shape[-1]  # type: ignore[union-attr]
    if value is None or value.dtype not in _ROW_DTYPES or value.device.type != "cpu":
        return None
    if not statically_known_true(sym_eq([*value.shape], [columns])):
        return None
    return Norm(eps, (*steps, out), weight, offset, rounds_first)


def _without_offset(factor: fx.Node) -> tuple[fx.Node, float]:
    """Return a weight as it is stored and the number added to it, if that is done in fp32."""
    if _dtype(factor) is not _FP32:
        return factor, 0.0
    weight, offset = factor, 0.0
    if factor.target in (aten.add.Tensor, aten.add.Scalar) and not factor.kwargs:
        term, number = factor.args
        if isinstance(term, fx.Node) and isinstance(number, int | float):
            weight, offset = term, float(number)
    if _is_conversion(weight, _FP32) and _dtype(weight.args[0]) in _ROW_DTYPES:
        weight = weight.args[0]  # type: ignore[assignment]
    return weight, offset


# ---- nodes ---------------------------------------------------------------------------------------


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _dtype(node: Any) -> torch.dtype | None:
    value = _value(node)
    return None if value is None else value.dtype


def _only(node: fx.Node, *targets: Any) -> fx.Node | None:
    """Return the only reader of a node, if it is a call of one of these."""
    [*users] = node.users
    return users[0] if len(users) == 1 and users[0].target in targets else None


def _other(node: fx.Node, first: fx.Node) -> fx.Node | None:
    """Return the other one of the two nodes that a node reads."""
    second = next((one for one in node.args if one is not first), None)
    return second if isinstance(second, fx.Node) else None


def _is_conversion(node: fx.Node, dtype: torch.dtype) -> bool:
    return node.target is prims.convert_element_type.default and node.args[1] is dtype


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    first, second = _value(node), _value(other)
    return (
        first is not None
        and second is not None
        and (first.dtype, first.device) == (second.dtype, second.device)
        and statically_known_true(sym_eq([*first.shape], [*second.shape]))
    )


def _is_dense(value: torch.Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True
