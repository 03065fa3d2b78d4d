# SPDX-License-Identifier: Apache-2.0
"""A call on one tensor, and its checks on this rank.

Decides the checks of arguments, all before anything is published, so that a wrong call leaves the
group usable. Decides how arrays reach the core. Must not know how a plan is chosen, nor
queues.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch

from fastcoll.calls.arrays import (
    Array,
    ArrayView,
    check_output,
    check_overlap,
    copy_back,
    dense_copy,
    premultiplied,
    refuse_moved,
    view,
)
from fastcoll.calls.epilogues import Step, TritonEpilogue, gives_floats
from fastcoll.calls.rows import RMSNorm, Rows, check_rows, gives_codes
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.native import _C
from fastcoll.types import BY_NAME, REDUCE_OPS, DType, Op, ReduceOp, Verb, Wire, supported_ops

_OPS = tuple(zip(REDUCE_OPS, Op, strict=True))
_WIRES = tuple(wire.name for wire in Wire if wire is not Wire.none)
_CODED_DTYPES = (DType.float32, DType.float16, DType.bfloat16)
_NAMES = {
    Verb.all_reduce: ("tensor", "out"),
    Verb.reduce_scatter: ("input", "output"),
    Verb.all_gather: ("input_tensor", "output_tensor"),
    Verb.broadcast: ("tensor", "tensor"),
    Verb.reduce: ("tensor", "out"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseCall:
    """A verb with its options, as the user gave them; None means the default."""

    verb: Verb
    op: object = ReduceOp.SUM
    async_op: bool = False
    algorithm: str = "auto"
    numerics: str | None = None
    timeout_s: float | timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(BaseCall):
    """A call with an array on each side."""

    input: Array | None = None
    output: Array | None = None
    root: int = 0
    then: RMSNorm | TritonEpilogue | None = None
    wire: str | None = None
    # fp32, an element for each of the message. This rank adds its elements to those that it codes
    # for `wire`, and overwrites them with the error of the coding.
    feedback: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Flat:
    """The arrays that the core reads and writes, each in one piece; copies replace the others."""

    input_ptr: int
    output_ptr: int
    finish: Callable[[], None]  # brings the result to where the user wants it
    # Where parts are uneven, the elements given to each rank, then those got from each.
    counts: tuple[int, ...] = ()
    # By rank, the input's parts if they lie apart, with no `input_ptr`; the output's.
    parts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    keeps: object = None  # copies that must live as long as this


@dataclass(frozen=True, slots=True)
class Operands:
    """The checked arguments of a call."""

    dtype: DType
    op: Op
    numel: int
    root: int
    input: ArrayView | None  # this rank's input; None where it only receives (broadcast)
    output: ArrayView | None  # this rank's output; None where it only gives
    splits: int = 0
    rows: Rows | Step | None = None  # the steps on the output, or on its rows
    wire: Wire = Wire.none
    feedback: torch.Tensor | None = None

    @property
    def device(self) -> int:
        """Index of the GPU that the arrays lie on; -1 for the CPU."""
        some = self.input or self.output
        return -1 if some is None else some.device

    def flat(self, *, takes_apart: bool = False) -> Flat:
        """Return the input and output for the core: the arrays, or dense copies of strided ones.

        `takes_apart` is for calls with parts; see `PartsOperands`.
        """
        del takes_apart
        source, target = self.input, self.output
        if source is not None and not source.dense:
            source = dense_copy(source, fill=True)
        if target is not None and not target.dense:
            target = source if target is self.input else dense_copy(target, fill=False)
        source, target = source or target, target or source
        plain = target if self.rows is None or target is None else self.rows.plain_in(target)

        def finish() -> None:
            if self.rows is not None and plain is not None and target is not None:
                self.rows.run(plain, target)
            if self.output is not None and target is not None and target is not self.output:
                copy_back(self.output, target)

        input_ptr, output_ptr = (0 if one is None else one.ptr for one in (source, plain))
        return Flat(input_ptr, output_ptr, finish, keeps=(source, plain))

    def carry_out(self, group: _C.Group, plan: _C.Plan, limit_s: float) -> None:
        """Run the plan of this call, and bring the result to where the user wants it."""
        flat = self.flat()
        group.run(plan, flat.input_ptr, flat.output_ptr, limit_s)
        flat.finish()

    def make_ready(self) -> None:
        """Compile what follows the reduction, if it has to be."""
        if self.rows is not None and self.output is not None:
            self.rows.make_ready(self.output)

    def views(self) -> list[ArrayView]:
        arrays = [array for array in (self.input, self.output) if array is not None]
        return arrays if self.rows is None else [*arrays, *self.rows.tensors.values()]

    def written(self) -> list[ArrayView]:
        """Return the arrays that the call writes on this rank."""
        written = [] if self.output is None else [self.output]
        return written if self.rows is None else [*written, *self.rows.written()]

    def outputs(self) -> list[Array]:
        """Return the arrays that hold the result once the call is complete."""
        result = self.output or self.input
        return [] if result is None else [result.source]


def check(call: Call, rank: int, world_size: int) -> Operands:
    """Check the arguments of a call.

    Raises:
        UsageError: They do not fit together.
        UnsupportedError: Their memory, dtype or operation can't be had.
    """
    if call.verb is Verb.barrier:
        return Operands(DType.uint8, Op.SUM, 0, 0, None, None)
    input_name, output_name = _NAMES[call.verb]
    source = view(call.input, input_name, gpu=True)
    if call.verb is Verb.broadcast:
        return _broadcast(source, call.root, rank, world_size)
    root = checked_rank(call.root, "dst", world_size) if call.verb is Verb.reduce else 0
    if call.verb is Verb.reduce and rank != root:
        op, source = reduction_of(call.op, source, input_name)
        return Operands(source.dtype, op, source.numel, root, source, None)
    target = source
    if call.output is call.input:
        output_name = input_name
    else:
        target = view(call.output, output_name, gpu=True)
    check_output(target, output_name)
    check_one_device(((source, input_name), (target, output_name)))
    is_cast = gives_codes(call.then, target.dtype) or gives_floats(
        call.then, source.dtype, target.dtype
    )
    kinds = source.kind_of_elements, target.kind_of_elements
    if kinds[0] != kinds[1] and not is_cast:
        raise UsageError(
            f"{input_name} is {kinds[0]} and {output_name} is {kinds[1]}; they need one dtype"
        )
    numel, own_chunk = _fit(call.verb, source, target, rank, world_size)
    if not own_chunk:
        check_overlap(source, target, f"{input_name} and {output_name}")
    op = Op.SUM
    if call.verb is not Verb.all_gather:
        op, source = reduction_of(call.op, source, input_name)
    rows = None
    if call.then is not None:
        rows = check_rows(call.then, op, source, target, output_name)
        check_one_device(((target, output_name), *rows.named()))
    wire = checked_wire(call.wire, source.dtype, op)
    sides = source, target
    return Operands(source.dtype, op, numel, root, *sides, 0, rows, wire, call.feedback)


def check_one_device(arrays: Sequence[tuple[ArrayView, str]]) -> None:
    """Raise UsageError if arrays, each with its name, lie on different devices."""
    first, first_name = arrays[0]
    for array, name in arrays[1:]:
        if array.device != first.device:
            raise UsageError(
                f"{first_name} is on {_place(first)} and {name} on {_place(array)}; they need one "
                "device"
            )


def _place(array: ArrayView) -> str:
    return "the CPU" if array.device < 0 else f"cuda:{array.device}"


def _fit(
    verb: Verb, source: ArrayView, target: ArrayView, rank: int, world_size: int
) -> tuple[int, bool]:
    """Check the sizes; return the message's numel, and whether a part is its place in the whole.

    That a part is this rank's chunk of the whole is the usual way to work in place.
    """
    if verb in (Verb.all_reduce, Verb.reduce):
        if target.shape != source.shape:
            raise UsageError(f"out has shape {target.shape}, but tensor has {source.shape}")
        return source.numel, False
    gathers = verb is Verb.all_gather
    part, whole = (source, target) if gathers else (target, source)
    if whole.numel != part.numel * world_size:
        raise UsageError(
            f"{'output_tensor' if gathers else 'input'} of shape {whole.shape} has {whole.numel} "
            f"elements; a group of {world_size} ranks needs {part.numel * world_size}"
        )
    own_chunk = part.dense and whole.dense and part.ptr == whole.ptr + rank * part.num_bytes
    return part.numel, own_chunk


def _broadcast(tensor: ArrayView, src: object, rank: int, world_size: int) -> Operands:
    root = checked_rank(src, "src", world_size)
    if rank == root:
        return Operands(tensor.dtype, Op.SUM, tensor.numel, root, tensor, None)
    check_output(tensor, "tensor")
    return Operands(tensor.dtype, Op.SUM, tensor.numel, root, None, tensor)


def checked_rank(value: object, name: str, world_size: int) -> int:
    """Return `value` if it is a rank of the group, else raise UsageError."""
    rank = checked_integer(value, f"{name} must be a rank")
    if not 0 <= rank < world_size:
        raise UsageError(f"{name}={rank} is not a rank of a group of {world_size}")
    return rank


def checked_integer(value: object, requirement: str) -> int:
    """Return `value` if it is an integer, else raise UsageError with the requirement."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{requirement}, not {value!r}") from None


def reduction_of(op: object, array: ArrayView, name: str) -> tuple[Op, ArrayView]:
    """Return the reduction that `op` means, and this rank's input for it.

    Raises:
        UsageError: `op` is no reduction.
        UnsupportedError: It means nothing for the array's type.
    """
    refuse_moved(array, name)
    premultiplies: object = ReduceOp.PREMUL_SUM
    if isinstance(op, ReduceOp) and op == premultiplies:  # a rank's factor is its own affair
        state = cast(Any, op).__getstate__()
        if isinstance(state, tuple):  # else it was made without a factor
            return known_reduction(ReduceOp.SUM, array.dtype), premultiplied(array, state[1])
    return known_reduction(op, array.dtype), array


def checked_wire(name: object, dtype: DType, op: Op) -> Wire:
    """Return the format in which elements cross between nodes.

    Raises:
        UsageError: There is no such format.
        UnsupportedError: It is not for this type or operation.
    """
    if name is None:
        return Wire.none
    if not isinstance(name, str) or name not in _WIRES:
        known = ", ".join(f'"{one}"' for one in _WIRES)
        raise UsageError(f"wire must be one of {known} or None, not {name!r}")
    if op not in (Op.SUM, Op.AVG):
        raise UnsupportedError(f'wire="{name}" works for SUM and AVG, not for {op.name}')
    if dtype not in _CODED_DTYPES:
        names = ", ".join(one.name for one in _CODED_DTYPES)
        raise UnsupportedError(f'wire="{name}" works for {names}, not for {dtype.name}')
    if name == "bf16" and dtype is not DType.float32:
        raise UnsupportedError(
            f'wire="bf16" saves no bytes of {dtype.name}: give "int8" or "fp8", or None'
        )
    return Wire[name]


def reduction_numbered(number: int) -> ReduceOp:
    """Return torch's member for the number of an operation, by which operators name it."""
    if 0 <= number < len(REDUCE_OPS):
        member: ReduceOp = REDUCE_OPS[number]
        return member
    known = ", ".join(f"{int(op)} ({op.name})" for op in Op)
    raise UsageError(f"no reduction has the number {number}: it is one of {known}")


def known_reduction(op: object, dtype: DType) -> Op:
    """Return the reduction that `op` means; see `reduction_of`."""
    if isinstance(op, str) and op in BY_NAME:
        known: Op | None = BY_NAME[op]
    elif isinstance(op, ReduceOp | ReduceOp.RedOpType):
        # By ==, as torch's objects and their kinds are equal but do not hash alike.
        known = next((ours for torchs, ours in _OPS if op == torchs), None)
    else:
        names = ", ".join(f'"{name}"' for name in BY_NAME)
        raise UsageError(f"op must be a fastcoll.ReduceOp or one of {names}, not {op!r}")
    if known is None:
        name = getattr(op, "op", op)
        raise UnsupportedError(
            f"{name} is not supported; the operations are {', '.join(o.name for o in Op)}"
        )
    if known not in supported_ops(dtype):
        names = ", ".join(o.name for o in supported_ops(dtype))
        raise UnsupportedError(f"{known.name} has no meaning for {dtype.name}, which has {names}")
    return known
