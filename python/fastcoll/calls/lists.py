# SPDX-License-Identifier: Apache-2.0
"""Calls on lists of tensors, and their checks.

Decides that the tensors of one dtype are one message under one synchronisation, in the order of the
list. Dtypes follow each other as they first appear. Must not know how a plan is
chosen, nor queues.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fastcoll.calls.arrays import Array, ArrayView, check_apart, overlap
from fastcoll.calls.tensors import BaseCall, Call, Operands, check
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.native import _C
from fastcoll.types import DType, Op, Verb

_NAMES = {
    Verb.all_reduce: ("tensors", "tensors"),
    Verb.reduce_scatter: ("inputs", "outputs"),
    Verb.all_gather: ("inputs", "outputs"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListCall(BaseCall):
    """A call with a list on each side, in which tensors of one index belong together."""

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    wire: str | None = None


@dataclass(frozen=True, slots=True)
class ListOperands:
    """As `Operands`, of the tensors of a list that have one dtype."""

    dtype: DType
    op: Op
    numel: int  # elements of a part of the message: of all tensors
    tensors: tuple[Operands, ...]
    splits: int
    root: int = 0

    def written(self) -> list[ArrayView]:
        return [array for one in self.tensors for array in one.written()]

    def outputs(self) -> list[Array]:
        return [array for one in self.tensors for array in one.outputs()]

    def carry_out(self, group: _C.Group, plan: _C.Plan, limit_s: float) -> None:
        flat = [one.flat() for one in self.tensors]
        pieces = [
            (each.input_ptr, each.output_ptr, one.numel)
            for one, each in zip(self.tensors, flat, strict=True)
        ]
        group.run_list(plan, pieces, limit_s)
        for each in flat:
            each.finish()


def check_list(call: ListCall, rank: int, world_size: int) -> list[Operands] | list[ListOperands]:
    """Check the arguments of a call; return its parts of one dtype, or on GPUs its tensors.

    Raises:
        UsageError: They do not fit together.
        UnsupportedError: Their memory, dtype or operation can't be had.
    """
    checked = _check_each(call, rank, world_size)
    if any(one.device >= 0 for one in checked):
        return checked
    _check_apart(checked)
    sizes = [(int(one.dtype), one.numel) for one in checked]
    every: dict[DType, list[Operands]] = {}
    for one in checked:
        every.setdefault(one.dtype, []).append(one)
    return [
        ListOperands(
            dtype,
            tensors[0].op,
            sum(one.numel for one in tensors),
            tuple(tensors),
            _C.list_splits(sizes, dtype),
        )
        for dtype, tensors in every.items()
    ]


def _check_apart(checked: Sequence[Operands]) -> None:
    """Check that no output overlaps the input or output of another tensor of the list."""
    written, read = [], []
    for one in checked:
        if not one.input or not one.output:
            continue
        if overlap(one.input, one.output):  # in place: the smaller one is a part of the larger one
            written.append(max(one.input, one.output, key=lambda array: array.num_bytes))
        else:
            written.append(one.output)
            read.append(one.input)
    check_apart(written, read)


def _check_each(call: ListCall, rank: int, world_size: int) -> list[Operands]:
    input_name, output_name = _NAMES[call.verb]
    for name, arrays in ((input_name, call.inputs), (output_name, call.outputs)):
        if not isinstance(arrays, list | tuple):
            raise UsageError(f"{name} must be a list of tensors, not {type(arrays).__name__}")
    if len(call.inputs) != len(call.outputs):
        raise UsageError(
            f"{input_name} has {len(call.inputs)} tensors, but {output_name} has "
            f"{len(call.outputs)}"
        )
    if not call.inputs:
        raise UsageError(f"{input_name} is empty: give at least one tensor, as many on every rank")
    checked = []
    for index, (source, target) in enumerate(zip(call.inputs, call.outputs, strict=True)):
        one = Call(verb=call.verb, input=source, output=target, op=call.op, wire=call.wire)
        try:
            checked.append(check(one, rank, world_size))
        except (UsageError, UnsupportedError) as error:
            raise type(error)(f"tensor {index} of the list: {error}") from None
    return checked
