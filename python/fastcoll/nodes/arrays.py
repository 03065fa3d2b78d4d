# SPDX-License-Identifier: Apache-2.0
"""Plain arrays of one process: laid on addresses, widened, reduced in order, rounded.

Decides the type of partial results. Half types and fp8 are held in fp32, so that a sum over nodes
is rounded once, like one within a node. Must not know nodes.
"""

import ctypes
from collections.abc import Sequence

import torch

from fastcoll.memory.symmetric import bytes_at
from fastcoll.native import _C
from fastcoll.types import ITEMSIZE, TORCH_DTYPES, DType, Op, Wire, accumulator, order_matters

# Elements that are coded with one scale (csrc/cpu/wire.h).
WIRE_BLOCK = 128


def tensor_at(address: int, dtype: DType, numel: int, device: int = -1) -> torch.Tensor:
    """Return a tensor on memory that another object keeps; `device`: -1 for the CPU."""
    if device >= 0:
        return bytes_at(address, numel * ITEMSIZE[dtype], device).view(TORCH_DTYPES[dtype])
    if numel == 0:
        return torch.empty(0, dtype=TORCH_DTYPES[dtype], device="cpu")
    memory = (ctypes.c_char * (numel * ITEMSIZE[dtype])).from_address(address)
    return torch.frombuffer(memory, dtype=TORCH_DTYPES[dtype])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy contiguous elements; as bytes, since torch needs users' arrays to be aligned."""
    as_bytes(target).copy_(as_bytes(source))


def partial_dtype(dtype: DType, op: Op) -> DType:
    """Return the type in which partial results have all their bits."""
    return accumulator(dtype) if order_matters(dtype, op) else dtype


def partial_op(op: Op) -> Op:
    """Return the operation that makes partial results: an average is a sum until its end."""
    return Op.SUM if op is Op.AVG else op


def widen(target: torch.Tensor, source: torch.Tensor, dtype: DType) -> None:
    """Write elements of `dtype` as partial results of one rank."""
    if target.dtype == source.dtype:
        copy(target, source)
    else:
        _C.widen_array(dtype, source.data_ptr(), target.data_ptr(), source.numel())


def reduce_into(target: torch.Tensor, rows: Sequence[torch.Tensor], dtype: DType, op: Op) -> None:
    """Reduce partial results of type `dtype` in the order of the rows."""
    sources = [row.data_ptr() for row in rows]
    _C.reduce_arrays(dtype, partial_op(op), sources, target.data_ptr(), target.numel())


def finish(target: torch.Tensor, partial: torch.Tensor, dtype: DType, op: Op, world: int) -> None:
    """Round partial results to `dtype`, once; an average is divided before."""
    if op is Op.AVG or target.dtype != partial.dtype:
        addresses = partial.data_ptr(), target.data_ptr()
        _C.finish_array(dtype, op, *addresses, target.numel(), world)
    elif target.data_ptr() != partial.data_ptr():
        copy(target, partial)


def round_to(target: torch.Tensor, partial: torch.Tensor, dtype: DType) -> None:
    """Round partial results to `dtype`, also where they have this type: NaN becomes canonical."""
    addresses = partial.data_ptr(), target.data_ptr()
    _C.finish_array(dtype, Op.SUM, *addresses, target.numel(), 1)


def coded_bytes(wire: Wire, numel: int) -> int:
    """Return how many bytes a coded array has."""
    return _C.coded_array_bytes(wire, numel)


def code(
    wire: Wire, source: torch.Tensor, feedback: torch.Tensor | None, divisor: int
) -> torch.Tensor:
    """Return coded elements of an fp32 array, divided before.

    `feedback` is of the same length. It is added before the coding, and becomes its error.
    """
    coded = torch.empty(coded_bytes(wire, source.numel()), dtype=torch.uint8, device="cpu")
    address = 0 if feedback is None else feedback.data_ptr()
    _C.code_array(wire, source.data_ptr(), coded.data_ptr(), address, source.numel(), divisor)
    return coded


def add_coded(
    wire: Wire, rows: Sequence[torch.Tensor], target: torch.Tensor, numel: int, *, coded_again: bool
) -> None:
    """Add coded arrays in their order, to fp32 or coded again; one to fp32: decode it."""
    addresses = [row.data_ptr() for row in rows]
    _C.add_coded_arrays(wire, addresses, target.data_ptr(), numel, coded_again)


def split(tensor: torch.Tensor, sizes: int | Sequence[int]) -> list[torch.Tensor]:
    """Cut a flat tensor into pieces of these sizes, or of at most this one."""
    pieces = tensor.split(sizes if isinstance(sizes, int) else list(sizes))  # type: ignore[no-untyped-call]
    return list(pieces)
