# SPDX-License-Identifier: Apache-2.0
"""The steps behind a reduction, on the rows of its result: `then=RMSNorm(...)`.

Decides the checks of its tensors, all before anything is published, and where the plain result
waits. The arithmetic is C++'s (csrc/cpu/rows.h), and so is a call that is known. Must not know how
the reduction is carried out. A program's own step on GPUs is in epilogues.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from fastcoll.calls.arrays import Array, ArrayView, check_output, overlap, view
from fastcoll.calls.epilogues import Step, TritonEpilogue, check_epilogue
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.native import _C
from fastcoll.types import TORCH_DTYPES, DType, Op

_ROWS = (DType.float32, DType.float16, DType.bfloat16)
_CODES = (DType.int8, DType.float8_e4m3fn)


class RMSNorm(_C.RowNorm):
    """Steps behind a sum: add a residual, normalise each row by its root mean square, scale.

    Give it as `then=` to `all_reduce` or `reduce_scatter_tensor`, on CPU tensors. The rows of the
    result are its last dimension. The bits are those of the plain call and then the steps::

        summed = result + residual                           # rounded to the dtype
        out = summed / sqrt(mean(summed**2) + eps) * (weight + offset)

    The second line is computed in float32 and rounded once; docs/numerics.md defines it. The sum of
    the squares is exact on a grid, so no order and no instruction set changes it. It is local:
    ranks may give different ones, or none. It cannot be changed; it keeps its tensors, and a call
    reads them as they are then. One may serve any number of calls.

    Args:
        weight: [columns], of float32, float16 or bfloat16; None: ones.
        eps: Added to the mean of the squares; not negative.
        residual: Of the result's shape and the input's dtype; None: nothing is added.
        summed: Where the sum with the residual goes, alike; None: into `residual`, if there is one.
        offset: Added to the weight: 1.0 for Gemma's norm.
        rounds_first: Round to the input's dtype before the weight, as Hugging Face's Llama does.
        wide_sum: Normalise the sum with the residual as it is in float32, as vLLM does. `summed` is
            rounded all the same.
        scales: float32 [rows]. Then `out` is int8 or float8_e4m3fn: each row is divided by its
            scale, which is stored here.

    Raises:
        UsageError: `eps` is negative or not finite, `offset` is no number, or one of the tensors
            is none.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        def __init__(
            self,
            weight: Array | None = None,
            eps: float = 1e-6,
            *,
            residual: Array | None = None,
            summed: Array | None = None,
            offset: float = 0.0,
            rounds_first: bool = False,
            wide_sum: bool = False,
            scales: Array | None = None,
        ) -> None: ...

    def __repr__(self) -> str:
        numbers = f"eps={self.eps:g}, offset={self.offset:g}, rounds_first={self.rounds_first}"
        numbers += ", wide_sum=True" if self.wide_sum else ""
        shapes = (f", {name}={tuple(one.shape)}" for name, one in _tensors(self))
        return f"<fastcoll.RMSNorm {numbers}{''.join(shapes)}>"


_C.set_row_norm(RMSNorm)


def _tensors(norm: RMSNorm) -> Iterator[tuple[str, Array]]:
    names = ("weight", "residual", "summed", "scales")
    yield from ((name, one) for name in names if (one := getattr(norm, name)) is not None)


@dataclass(frozen=True, slots=True)
class Rows:
    """The checked tensors and numbers of a norm behind a call."""

    norm: RMSNorm
    dtype: DType
    tensors: dict[str, ArrayView]

    def named(self) -> list[tuple[ArrayView, str]]:
        """Return the tensors, each with its name."""
        return [(one, name) for name, one in self.tensors.items()]

    def written(self) -> list[ArrayView]:
        """Return the tensors that the call writes besides its output."""
        return [self.tensors[name] for name in _written(self.tensors)]

    def plain_in(self, out: ArrayView) -> ArrayView:
        """Return where the plain result waits for its rows: in `out`, unless that takes codes."""
        if out.dtype is self.dtype:
            return out
        summed, residual = self.tensors.get("summed"), self.tensors.get("residual")
        if summed is not None and (residual is None or summed.ptr != residual.ptr):
            return summed
        room = torch.empty(out.shape, dtype=TORCH_DTYPES[self.dtype], device="cpu")
        return view(room, "the result before it is quantised")

    def make_ready(self, out: ArrayView) -> None:
        """Do nothing: the steps are compiled."""

    def run(self, plain: ArrayView, out: ArrayView) -> None:
        """Do the steps for all rows of the plain result."""
        tensors, norm = self.tensors, self.norm
        ptr = {name: one.ptr for name, one in tensors.items()}
        weight = tensors.get("weight")
        _C.run_rows(
            (self.dtype, self.dtype if weight is None else weight.dtype, out.dtype),
            (
                plain.ptr,
                ptr.get("residual", 0),
                ptr.get("summed", ptr.get("residual", 0)),
                ptr.get("weight", 0),
                out.ptr,
                ptr.get("scales", 0),
            ),
            (prod(out.shape[:-1]), out.shape[-1]),
            norm.eps,
            norm.offset,
            (norm.rounds_first, norm.wide_sum),
        )


def _written(tensors: dict[str, ArrayView]) -> list[str]:
    summed = "summed" if "summed" in tensors else "residual"
    return [name for name in (summed, "scales") if name in tensors]


def gives_codes(then: object, dtype: DType) -> bool:
    """Return whether an output of this dtype gets the codes of quantised rows."""
    return isinstance(then, RMSNorm) and then.scales is not None and dtype in _CODES


def check_rows(
    then: object, op: Op, source: ArrayView, target: ArrayView, target_name: str
) -> Rows | Step:
    """Check `then` and its tensors.

    Raises:
        UsageError: They do not fit the output, or a written one overlaps another.
        UnsupportedError: The reduction or the device has no rows.
    """
    if isinstance(then, TritonEpilogue):
        return check_epilogue(then, source, target, target_name)
    if not isinstance(then, RMSNorm):
        raise UsageError(
            "then must be a fastcoll.RMSNorm or a fastcoll.TritonEpilogue, not "
            f"{type(then).__name__}"
        )
    if target.device >= 0:
        raise UnsupportedError(
            "then=RMSNorm is for CPU tensors; on a GPU give a fastcoll.TritonEpilogue, or "
            "normalise after the call"
        )
    if source.dtype not in _ROWS or op not in (Op.SUM, Op.AVG):
        raise UnsupportedError(
            "then=RMSNorm follows SUM or AVG of float32, float16 or bfloat16, not "
            f"{op.name} of {source.dtype.name}"
        )
    if not target.shape or target.shape[-1] == 0:
        raise UsageError(f"{target_name} of shape {target.shape} has no rows to normalise")
    if then.scales is not None and target.dtype not in _CODES:
        raise UsageError(
            f"with scales, {target_name} is int8 or float8_e4m3fn, not {target.dtype.name}"
        )
    expected = {
        "weight": (target.shape[-1:], _ROWS),
        "residual": (target.shape, (source.dtype,)),
        "summed": (target.shape, (source.dtype,)),
        "scales": ((prod(target.shape[:-1]),), (DType.float32,)),
    }
    tensors = {name: _checked(name, one, *expected[name]) for name, one in _tensors(then)}
    for name in _written(tensors):
        check_output(tensors[name], name)
    _check_apart(tensors, source, target, target_name)
    return Rows(then, source.dtype, tensors)


def _checked(
    name: str, tensor: object, shape: tuple[int, ...], dtypes: tuple[DType, ...]
) -> ArrayView:
    found = view(tensor, name, gpu=True)
    if found.shape != shape or found.dtype not in dtypes or not found.dense:
        kinds = ", ".join(dtype.name for dtype in dtypes)
        layout = "" if found.dense else ", not contiguous"
        raise UsageError(
            f"{name} of then has shape {found.shape} of {found.dtype.name}{layout}; it needs "
            f"{shape} of {kinds}, contiguous"
        )
    return found


def _check_apart(
    tensors: dict[str, ArrayView], source: ArrayView, target: ArrayView, target_name: str
) -> None:
    """Raise UsageError if a written tensor overlaps another one, but the residual its sum."""
    others = {**tensors, target_name: target, "the input": source}
    for name in (*_written(tensors), target_name):
        for other, array in others.items():
            if other == name or (name, other) == (target_name, "the input"):
                continue
            one = others[name]
            is_same = (one.ptr, one.numel) == (array.ptr, array.numel)
            is_sum = is_same and {name, other} == {"residual", "summed"}
            if not is_sum and overlap(one, array):
                raise UsageError(f"{name} overlaps {other}; pass separate memory")
