# SPDX-License-Identifier: Apache-2.0
"""A program's own step behind a reduction on GPUs: `then=TritonEpilogue(...)`.

Decides its checks, all before anything is published, and when its kernel is compiled: then, too.
The kernel is that of fastcoll_kernels.apply, in the call's stream behind the call. Must not know
how the reduction is carried out. Imports Triton only where a program gives a function of Triton's.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from fastcoll.calls.arrays import ArrayView, dense_copy, overlap, view
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.types import COMPLEX_DTYPES, FLOAT_DTYPES, TORCH_DTYPES, DType

_PARAMETERS = ("value", "index", "mask", "row", "args")
_MOST_COLUMNS = 1 << 20  # Triton's largest block
_ALIGNMENT = 16  # Triton compiles other code for addresses that are no multiple of this


@dataclass(frozen=True, slots=True, eq=False)
class TritonEpilogue:
    """A program's own step behind a reduction on GPUs: a Triton function on its elements or rows.

    Give it as `then=` to `all_reduce` or `reduce_scatter_tensor`, on tensors of a GPU. The output
    has what the function returns, for the values that the plain call would have stored::

        @triton.jit
        def gelu(value, index, mask, row, args):
            return value * tl.sigmoid(1.702 * value)

        fastcoll.all_reduce(x, then=fastcoll.TritonEpilogue(gelu))

    It is one kernel more, in the stream of the call and behind it, in captured graphs too. It has
    the bits of the plain call and then the function. It is local: ranks may give different ones,
    or none. The output may have another floating-point dtype than the input.

    The first call compiles the function for these dtypes, before anything is sent. A rank that
    compiles is late for its peers, and a capture can't wait for it: `fastcoll.prepare` compiles on
    all ranks first.

    Args:
        function: A @triton.jit function (value, index, mask, row, args) -> value to store.
            `value` is a block of the result: of float32 for half types and fp8, else of its own
            dtype. `index` has the elements' positions in the output, valid where `mask`. `row` is
            the number of the row, if `by_rows`. The function may load and store through tensors
            in `args`. Multiplications and additions are not fused.
        args: Its last argument, a tuple of tensors on the output's device and of numbers. The
            tensors must not overlap the output. Autograd is not told of what the function writes.
        by_rows: A block is a row, the last dimension of the output, padded to a power of two.
            Else it is any number of elements.

    Raises:
        UsageError: `function` is no such function, or `args` has something else.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    by_rows: bool = False
    _ready: set[tuple[object, ...]] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        if not _is_jit(self.function):
            raise UsageError(
                f"function must be a @triton.jit function ({', '.join(_PARAMETERS)}), not "
                f"{self.function!r}"
            )
        names = cast(Any, self.function).arg_names
        if len(names) != len(_PARAMETERS):
            raise UsageError(
                f"function takes ({', '.join(names)}); it needs {len(_PARAMETERS)} parameters: "
                f"({', '.join(_PARAMETERS)})"
            )
        if not isinstance(self.args, tuple):
            raise UsageError(f"args must be a tuple, not {type(self.args).__name__}")
        for place, one in enumerate(self.args):
            if not isinstance(one, torch.Tensor | int | float):
                raise UsageError(
                    f"args[{place}] must be a tensor or a number, not {type(one).__name__}"
                )


def _is_jit(function: object) -> bool:
    """Return whether it is a function for Triton's compiler or interpreter."""
    kinds = {
        "triton.runtime.jit": "JITFunction",
        "triton.runtime.interpreter": "InterpretedFunction",
    }
    # Without Triton there is no such function.
    found = [(sys.modules.get(module), name) for module, name in kinds.items()]
    return any(module and isinstance(function, getattr(module, name)) for module, name in found)


@dataclass(frozen=True, slots=True)
class Step:
    """A checked epilogue behind a call, with the tensors of its arguments by name."""

    then: TritonEpilogue
    dtype: DType
    tensors: dict[str, ArrayView]

    def named(self) -> list[tuple[ArrayView, str]]:
        return [(one, name) for name, one in self.tensors.items()]

    def written(self) -> list[ArrayView]:
        """Return no tensors: which ones the function writes is its own affair."""
        return []

    def plain_in(self, out: ArrayView) -> ArrayView:
        """Return where the plain result waits: in `out`, unless that has another dtype."""
        if out.dtype is self.dtype:
            return out
        room = torch.empty(out.shape, dtype=TORCH_DTYPES[self.dtype], device=_tensor_of(out).device)
        return view(room, "the result before its epilogue", gpu=True)

    def make_ready(self, out: ArrayView) -> None:
        """Compile the kernel, and load it, unless that was done for such arrays.

        Raises:
            UsageError: The function can't be compiled; or the stream is being captured, and the
                kernel would have to be loaded.
        """
        tensors = (out, *self.tensors.values())
        layouts = (out.shape, out.dense, *(one.ptr % _ALIGNMENT for one in tensors))
        key = (out.device, self.dtype, out.dtype, *layouts)
        if out.numel == 0 or key in self.then._ready:
            return
        # Only now: it imports Triton, which takes a second.
        from fastcoll_kernels import apply, loading

        target = out if out.dense else dense_copy(out, fill=False)
        arrays = _tensor_of(self.plain_in(target)), _tensor_of(target)
        with torch.cuda.device(out.device):
            try:
                code = apply.code_of(*arrays, self._for_kernels())
                must_wait = not loading.is_loaded(code) and torch.cuda.is_current_stream_capturing()
                if not must_wait:
                    loading.load(code)
            except Exception as error:  # of many classes, Triton's own
                raise UsageError(
                    f"the function of then can't be compiled for {self.dtype.name}: {error}"
                ) from error
        if must_wait:
            raise UsageError(
                "the function of then is not on the GPU yet for this call, and a capture can't "
                "load it: call fastcoll.prepare(tensor, then=..., out=...) before the capture"
            )
        self.then._ready.add(key)

    def run(self, plain: ArrayView, out: ArrayView) -> None:
        """Start the kernel in the current stream of the arrays' device."""
        from fastcoll_kernels.apply import apply

        with torch.cuda.device(out.device):
            apply(_tensor_of(plain), _tensor_of(out), self._for_kernels())

    def _for_kernels(self) -> Any:
        from fastcoll_kernels.call import Epilogue

        return Epilogue(self.then.function, self.then.args, self.then.by_rows)


def _tensor_of(array: ArrayView) -> torch.Tensor:
    """Return the tensor of an array on a GPU, which always has one."""
    return cast(torch.Tensor, array.source)


def gives_floats(then: object, dtype: DType, out: DType) -> bool:
    """Return whether an output of type `out` gets values of an epilogue of `dtype`."""
    return isinstance(then, TritonEpilogue) and {dtype, out} <= FLOAT_DTYPES


def check_epilogue(
    then: TritonEpilogue, source: ArrayView, target: ArrayView, target_name: str
) -> Step:
    """Check an epilogue against a call's arrays.

    Raises:
        UsageError: The output has no rows, or an argument overlaps it.
        UnsupportedError: There is no epilogue for its device, dtype or rows.
    """
    if target.device < 0:
        raise UnsupportedError(
            "then=TritonEpilogue runs on GPUs, and the tensors are on the CPU: give a "
            "fastcoll.RMSNorm, or call the function's steps after the call"
        )
    if source.dtype in COMPLEX_DTYPES:
        raise UnsupportedError(
            f"then=TritonEpilogue takes real numbers, not {source.dtype.name}: call the "
            "function's steps after the call"
        )
    if then.by_rows:
        columns = target.shape[-1] if target.shape else 0
        if columns == 0:
            raise UsageError(f"{target_name} of shape {target.shape} has no rows for an epilogue")
        if columns > _MOST_COLUMNS:
            raise UnsupportedError(
                f"{target_name} has rows of {columns} elements, and a block of Triton's has at "
                f"most {_MOST_COLUMNS}: leave by_rows out, or give shorter rows"
            )
    tensors = {
        f"args[{place}] of then": view(one, f"args[{place}] of then", gpu=True)
        for place, one in enumerate(then.args)
        if isinstance(one, torch.Tensor)
    }
    for name, one in tensors.items():
        if overlap(one, target):
            raise UsageError(f"{name} overlaps {target_name}; pass separate memory")
    return Step(then, source.dtype, tensors)
