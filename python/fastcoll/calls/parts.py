# SPDX-License-Identifier: Apache-2.0
"""Calls whose input or output has a part for each rank, and their checks.

Decides how lists and split sizes become parts, and which facts of them all ranks must agree on.
Must not know how a plan is chosen, nor queues.
"""

import ctypes
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import cast

import numpy as np
import torch

from fastcoll.calls.arrays import (
    Array,
    ArrayView,
    check_apart,
    check_output,
    copy_back,
    dense_copy,
    view,
)
from fastcoll.calls.foreign import has_dlpack, is_foreign
from fastcoll.calls.tensors import BaseCall, Flat, check_one_device, checked_rank, reduction_of
from fastcoll.errors import UsageError
from fastcoll.native import _C
from fastcoll.types import COUNTED, ITEMSIZE, DType, Op, Verb

_NAMES = {
    Verb.all_gather: ("tensor", "tensor_list"),
    Verb.reduce_scatter: ("input_list", "output"),
    Verb.gather: ("tensor", "gather_list"),
    Verb.scatter: ("scatter_list", "tensor"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsCall(BaseCall):
    """A call with a part for each rank; a list has one array for each.

    all_to_all has two arrays, cut by rows into `input_splits` and `output_splits` (None: equally),
    or two lists. A gather or scatter that is `single` has one array in place of the root's list.
    On the other ranks that array is ignored.
    """

    input: Array | Sequence[Array] | None
    output: Array | Sequence[Array] | None
    root: object = 0
    input_splits: Sequence[int] | None = None
    output_splits: Sequence[int] | None = None
    single: bool = False


@dataclass(frozen=True, slots=True)
class Side:
    """A rank's input, or its output."""

    views: tuple[ArrayView, ...]  # one array, or one for each rank
    # Elements of each rank's part; all of the array, if it is one that is not cut.
    numels: tuple[int, ...]
    cut: bool = True

    def dense(self, *, fill: bool) -> "Side":
        """Return a side that the core can read or write: with dense copies of strided arrays."""
        if all(array.dense for array in self.views):
            return self
        views = (one if one.dense else dense_copy(one, fill=fill) for one in self.views)
        return Side(tuple(views), self.numels, self.cut)

    def parts(self) -> list[tuple[int, int]]:
        """Return address and bytes of each rank's part."""
        if len(self.views) == len(self.numels) and self.cut:
            return [(array.ptr, array.num_bytes) for array in self.views]
        [whole] = self.views
        itemsize = ITEMSIZE[whole.dtype]
        starts = accumulate(self.numels, initial=0) if self.cut else [0] * len(self.numels)
        return [
            (whole.ptr + start * itemsize, numel * itemsize)
            for start, numel in zip(starts, self.numels, strict=False)
        ]

    def lies_apart(self) -> bool:
        """Return whether its arrays do not lie one after another."""
        ends = [(array.ptr, array.ptr + array.num_bytes) for array in self.views]
        return any(first[1] != second[0] for first, second in pairwise(ends))

    def apart(self) -> tuple[int, ...]:
        """Return where its arrays lie, if they lie apart and need no copies; else nothing."""
        usable = all(array.dense for array in self.views) and self.lies_apart()
        return tuple(array.ptr for array in self.views) if usable else ()

    def in_one_piece(self, *, fill: bool) -> tuple[int, torch.Tensor | None]:
        """Return where all of it lies, one part after another, and the copy made for that.

        The copy has the elements, or is for results to come.
        """
        if all(array.dense for array in self.views) and not self.lies_apart():
            return self.views[0].ptr, None
        if fill:
            plain = (
                one if one.factor is None else dense_copy(one, fill=True) for one in self.views
            )
            # As bytes: torch joins those of every type.
            copy = torch.cat([_bytes_of(array) for array in plain])
        else:
            numel = sum(array.numel for array in self.views)
            first = cast("torch.Tensor", self.views[0].source)  # only GPUs get results so
            copy = torch.empty(numel, dtype=first.dtype, device=first.device)
        return copy.data_ptr(), copy

    def take(self, copy: torch.Tensor) -> None:
        """Write results in a copy of all of it to the user's arrays."""
        pieces = torch.split(copy, [array.numel for array in self.views])
        for array, piece in zip(self.views, pieces, strict=True):
            copy_back(array, view(piece.view(array.shape), "copy", gpu=True))

    def bring_back(self, dense: "Side") -> None:
        """Write results in dense copies to the user's arrays."""
        for array, copy in zip(self.views, dense.views, strict=True):
            if copy is not array:
                copy_back(array, copy)


def _bytes_of(array: ArrayView) -> torch.Tensor:
    tensor = array.source
    if isinstance(tensor, np.ndarray):  # by its address: torch knows not all of NumPy's types
        if array.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        memory = (ctypes.c_char * array.num_bytes).from_address(array.ptr)
        return torch.frombuffer(memory, dtype=torch.uint8)
    dense = tensor.detach().resolve_conj().resolve_neg().flatten().contiguous()
    # One element is contiguous with any stride, which a view of its bytes may not have.
    return dense.as_strided(dense.shape, (1,)).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class PartsOperands:
    """As `Operands`, with parts; a side is None where this rank gives or gets nothing."""

    dtype: DType
    op: Op
    numel: int
    root: int
    input: Side | None
    output: Side | None
    splits: int = 0

    def carry_out(self, group: _C.Group, plan: _C.Plan, limit_s: float) -> None:
        source = self.input and self.input.dense(fill=True)
        target = self.output and self.output.dense(fill=False)
        if plan.verb == Verb.reduce_scatter and source and target:
            address, copy = source.in_one_piece(fill=True)
            group.run(plan, address, target.views[0].ptr, limit_s)
            del copy
        else:
            given = source.parts() if source else []
            group.run_parts(plan, given, target.parts() if target else [], limit_s)
        if self.output and target:
            self.output.bring_back(target)

    def flat(self, *, takes_apart: bool = False) -> Flat:
        """Return the memory for a GPU's kernel.

        All parts of a side are in one piece, unless the kernel takes them as they lie.
        """
        source, target = self.input, self.output
        input_parts = source.apart() if source and takes_apart else ()
        output_parts = target.apart() if target and takes_apart else ()
        input_ptr = output_ptr = 0
        given = taken = None
        if source and not input_parts:
            input_ptr, given = source.in_one_piece(fill=True)
        if target and not output_parts:
            output_ptr, taken = target.in_one_piece(fill=False)

        def finish() -> None:
            if target is not None and taken is not None:
                target.take(taken)

        counts = (*source.numels, *target.numels) if self.splits and source and target else ()
        return Flat(input_ptr, output_ptr, finish, counts, (input_parts, output_parts), given)

    @property
    def device(self) -> int:
        some = self.input or self.output
        return some.views[0].device if some else -1

    def views(self) -> list[ArrayView]:
        return [array for side in (self.input, self.output) if side for array in side.views]

    def written(self) -> list[ArrayView]:
        return list(self.output.views) if self.output else []

    def outputs(self) -> list[Array]:
        return [array.source for array in self.written()]


def check_parts(call: PartsCall, rank: int, world_size: int) -> PartsOperands:
    """Check the arguments of a call.

    Raises:
        UsageError: They do not fit together.
        UnsupportedError: Their memory, dtype or operation can't be had.
    """
    if call.verb is Verb.all_to_all:
        return _all_to_all(call, rank, world_size)
    input_name, output_name = _names_of(call)
    root = 0
    gives = gets = True
    if call.verb is Verb.gather:
        root = checked_rank(call.root, "dst", world_size)
        gets = rank == root
    elif call.verb is Verb.scatter:
        root = checked_rank(call.root, "src", world_size)
        gives = rank == root
    source = _side(call.input, input_name, world_size) if gives else None
    target = _side(call.output, output_name, world_size) if gets else None
    if not call.single:
        _refuse_list_off_root(call, source, target)
    dtype = _checked(source, target, input_name, output_name)
    single, listed = (source, target) if call.verb in _GATHERS else (target, source)
    numel, splits = _fit(single, listed, rank, call)
    if source and target:
        _check_apart(source, target, rank, own_part_may_be_one=True)
    op = Op.SUM
    if call.verb is Verb.reduce_scatter and source:
        reductions = [reduction_of(call.op, array, input_name) for array in source.views]
        op = reductions[0][0]
        source = replace(source, views=tuple(array for _, array in reductions))
    return PartsOperands(dtype, op, numel, root, source, target, splits)


_GATHERS = (Verb.all_gather, Verb.gather)


def _names_of(call: PartsCall) -> tuple[str, str]:
    source, target = _NAMES[call.verb]
    if not call.single:
        return source, target
    return source.replace("_list", "_tensor"), target.replace("_list", "_tensor")


def _refuse_list_off_root(call: PartsCall, source: Side | None, target: Side | None) -> None:
    """Check that a list is given on the root alone."""
    for side, given, name, who in (
        (source, call.input, "scatter_list", "src"),
        (target, call.output, "gather_list", "dst"),
    ):
        if side is None and given:
            raise UsageError(f"{name} must be given on rank {who}={call.root} only")


def _side(arrays: object, name: str, world_size: int) -> Side:
    """Look at an array, or at a list of one for each rank."""
    if name.endswith("_tensor"):  # in place of a list
        whole = view(arrays, name, gpu=True)
        if whole.numel % world_size:
            raise UsageError(
                f"{name} has {whole.numel} elements, which {world_size} ranks can't share equally"
            )
        return Side((whole,), (whole.numel // world_size,) * world_size)
    if not name.endswith("_list"):
        one = view(arrays, name, gpu=True)
        return Side((one,), (one.numel,) * world_size, cut=False)
    if not isinstance(arrays, list | tuple):
        raise UsageError(f"{name} must be a list of tensors, not {type(arrays).__name__}")
    if len(arrays) != world_size:
        raise UsageError(
            f"{name} has {len(arrays)} tensors; a group of {world_size} ranks needs {world_size}"
        )
    views = tuple(view(array, f"{name}[{index}]", gpu=True) for index, array in enumerate(arrays))
    return Side(views, tuple(array.numel for array in views))


def _checked(source: Side | None, target: Side | None, input_name: str, output_name: str) -> DType:
    for index, array in enumerate(target.views if target else ()):
        check_output(array, f"{output_name}[{index}]" if len(target.views) > 1 else output_name)  # type: ignore[union-attr]
    sides = ((source, input_name), (target, output_name))
    named = [(array, name) for side, name in sides if side for array in side.views]
    check_one_device(named)
    kinds = {array.kind_of_elements for array, _ in named}
    if len(kinds) != 1:
        names = " and ".join(sorted(kinds))
        raise UsageError(f"{input_name} and {output_name} need one dtype, not {names}")
    return named[0][0].dtype


def _fit(single: Side | None, listed: Side | None, rank: int, call: PartsCall) -> tuple[int, int]:
    """Check the sizes; return the message's numel, and the code of uneven ones."""
    if listed is None or single is None:
        [one] = (single or listed).views  # type: ignore[union-attr]
        return one.numel, 0
    sizes = listed.numels
    one = single.numels[0]
    verb = call.verb
    if sizes[rank] != one:
        names = _names_of(call)
        name, other = names[::-1] if verb in _GATHERS else names
        part = f"a rank's part of {name}" if call.single else f"{name}[{rank}], this rank's part,"
        raise UsageError(f"{part} has {sizes[rank]} elements, but {other} has {one}")
    if len(set(sizes)) == 1:
        return one, 0
    if verb is not Verb.all_gather:
        raise UsageError(f"{verb.name} needs parts of one size, not {list(sizes)}")
    return sum(sizes), _C.uneven_splits(sizes)


def _all_to_all(call: PartsCall, rank: int, world_size: int) -> PartsOperands:
    whole = isinstance(call.input, torch.Tensor | np.ndarray) or has_dlpack(call.input)
    lists = not whole and not is_foreign(call.input)
    if lists:
        names = ("input_tensor_list", "output_tensor_list")
        source = _side(call.input, names[0], world_size)
        target = _side(call.output, names[1], world_size)
    else:
        names = ("input", "output")
        source = cut(call.input, names[0], call.input_splits, world_size)
        target = cut(call.output, names[1], call.output_splits, world_size)
    dtype = _checked(source, target, *names)
    _check_apart(source, target, rank, own_part_may_be_one=False)
    if lists or call.input_splits is not None or call.output_splits is not None:
        if source.numels[rank] != target.numels[rank]:
            raise UsageError(
                f"{names[0]} gives rank {rank}, which is this one, {source.numels[rank]} elements, "
                f"but {names[1]} expects {target.numels[rank]} from it"
            )
        return PartsOperands(dtype, Op.SUM, 0, 0, source, target, COUNTED)
    if source.numels != target.numels:
        raise UsageError(
            f"input has {sum(source.numels)} elements and output has {sum(target.numels)}"
        )
    return PartsOperands(dtype, Op.SUM, source.numels[0], 0, source, target)


def cut(array: object, name: str, splits: Sequence[int] | None, world_size: int) -> Side:
    """Look at an array that is cut by rows, equally or into `splits`; UsageError if it can't be."""
    whole = view(array, name, gpu=True)
    if not whole.shape:
        raise UsageError(f"{name} has no dimension to be cut by")
    rows = whole.shape[0]
    if splits is None:
        if rows % world_size:
            advice = f"give {name}_split_sizes, on every rank"
            if whole.numel % world_size == 0:
                advice += f", or {name}.view(-1), whose elements they can share"
            raise UsageError(
                f"{name} has {rows} rows, which {world_size} ranks can't share equally; {advice}"
            )
        sizes = [rows // world_size] * world_size
    else:
        try:
            sizes = [operator.index(size) for size in splits]
        except TypeError:
            raise UsageError(f"{name}_split_sizes must be integers, not {splits!r}") from None
        if len(sizes) != world_size or min(sizes) < 0 or sum(sizes) != rows:
            raise UsageError(
                f"{name}_split_sizes {sizes} must be {world_size} numbers that add up to the "
                f"{rows} rows of {name}"
            )
    row_numel = whole.numel // rows if rows else 0
    return Side((whole,), tuple(size * row_numel for size in sizes))


def _check_apart(source: Side, target: Side, rank: int, *, own_part_may_be_one: bool) -> None:
    """Check that outputs overlap neither each other nor an input."""
    inputs = source.views
    if own_part_may_be_one:
        # In place: this rank's input is its own part of the output, or the other way round.
        index = rank if len(inputs) > 1 else 0
        one, other = inputs[index], target.views[rank if len(target.views) > 1 else 0]
        if one.dense and other.dense:
            is_in_place = source.parts()[rank][0] == target.parts()[rank][0]
        else:  # a strided whole does not say where its parts are
            is_whole = one.numel != source.numels[rank] or other.numel != target.numels[rank]
            is_in_place = not is_whole and one.ptr == other.ptr
            is_in_place = is_in_place and one.strides_bytes == other.strides_bytes
        if is_in_place:
            inputs = inputs[:index] + inputs[index + 1 :]
    check_apart(target.views, inputs)
