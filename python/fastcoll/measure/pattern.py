# SPDX-License-Identifier: Apache-2.0
"""Test data whose reductions are exact, and the check of a result against it.

Decides the numbers of each rank's input and the expected output; mpi_loop.c holds the same
formula. Independent of fastcoll: a reference that shared its code would share its mistakes.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastcoll.types import DType, Op, Request, Verb

# Prime, so that no chunk or segment (powers of two) put in the wrong place looks right.
PERIOD = 65521
_BLOCK_NUMEL = 16 * PERIOD
_GIVE_PARTS = ("reduce_scatter", "scatter", "all_to_all")
_GET_PARTS = ("all_gather", "gather", "all_to_all")
# Open MPI copies messages of up to 4 KiB to memory of its own; other libraries larger ones, too.
# Receivers read messages of more bytes where they lie.
_REWRITTEN_BYTES = 8 << 10


@dataclass(frozen=True)
class Cell:
    """One call to measure.

    `numel` counts the message as fastcoll does. For all_reduce, reduce and broadcast that is the
    tensor. For reduce_scatter and scatter it is the output, for all_gather and gather the input,
    for all_to_all one part, for barrier 0. In sendrecv, as in nccl-tests, every rank sends a
    message to the next rank and gets one from the rank before it.
    """

    verb: str
    dtype: str
    op: str
    numel: int
    world_size: int
    root: int = 0

    def request(self, **fields: Any) -> Request:
        """Return this call's request; `fields` are the facts that the cell does not have."""
        return Request(
            verb=Verb[self.verb],
            dtype=DType[self.dtype],
            op=Op[self.op.upper()],
            numel=self.numel,
            root=self.root,
            world_size=self.world_size,
            **fields,
        )

    @property
    def is_rewritten(self) -> bool:
        """Whether ranks write their input anew before each call, as a program would.

        Bytes that nobody writes stay in the cache of the peer that reads them. Results of
        all_reduce and the root's of reduce are inputs of the next call: they are new anyway.
        """
        return self.verb not in ("all_reduce", "barrier") and self.size_bytes >= _REWRITTEN_BYTES

    def rewritten_bytes(self, rank: int) -> int:
        """Return the bytes that a rank writes anew before each call."""
        gives = {"broadcast": rank == self.root, "scatter": rank == self.root}
        gives["reduce"] = rank != self.root
        if not (self.is_rewritten and gives.get(self.verb, True)):
            return 0
        return self.input_numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def total_numel(self) -> int:
        return max(self.input_numel, self.output_numel)

    @property
    def input_numel(self) -> int:
        """Return the elements that a rank gives."""
        return self.numel * (self.world_size if self.verb in _GIVE_PARTS else 1)

    @property
    def output_numel(self) -> int:
        """Return the elements that a rank gets."""
        return self.numel * (self.world_size if self.verb in _GET_PARTS else 1)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the larger side: the size column of nccl-tests."""
        return self.total_numel * self.torch_dtype.itemsize


def make_cell(verb: str, dtype: str, op: str, size_bytes: int, world_size: int) -> Cell:
    """Return the cell whose larger side has `size_bytes`, at least one element per rank."""
    if verb == "barrier":
        return Cell(verb, dtype, op, 0, world_size)
    parts = world_size if verb in _GIVE_PARTS + _GET_PARTS else 1
    itemsize = Cell(verb, dtype, op, 0, 1).torch_dtype.itemsize
    return Cell(verb, dtype, op, max(1, size_bytes // (parts * itemsize)), world_size)


@cache
def _values(op: str, rank: int) -> NDArray[np.int64]:
    """One period of rank's input: 0..4, or 1..2 for products; sums of 64 ranks stay exact."""
    idx = np.arange(PERIOD, dtype=np.uint32) + np.uint32(12289 * rank)
    mixed = ((idx * np.uint32(2654435761)) >> np.uint32(7)).astype(np.int64)
    return 1 + mixed % 2 if op == "product" else mixed % 5


def _reduced(cell: Cell) -> torch.Tensor:
    """One period of the reduction over all ranks, rounded once to the cell's dtype."""
    ranks = range(cell.world_size)
    dtype = cell.torch_dtype
    inputs = [torch.from_numpy(_values(cell.op, rank)).to(dtype) for rank in ranks]
    is_float = dtype.is_floating_point or dtype.is_complex
    wide = (torch.complex128 if dtype.is_complex else torch.float64) if is_float else torch.int64
    stacked = torch.stack([values.to(wide) for values in inputs]).numpy()
    ufunc = {
        "sum": np.add,
        "avg": np.add,
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }[cell.op]
    result = torch.from_numpy(ufunc.reduce(stacked, axis=0))
    if cell.op == "avg":
        rounding = None if is_float else "trunc"
        result = torch.div(result, cell.world_size, rounding_mode=rounding)
    return result.to(torch.bool) if dtype is torch.bool else result.to(dtype)


def _tiled(period: torch.Tensor) -> torch.Tensor:
    return period.repeat(_BLOCK_NUMEL // PERIOD + 1)


def fill_input(tensor: torch.Tensor, cell: Cell, rank: int) -> None:
    """Write rank's input of `cell` into `tensor` (one dimension)."""
    tile = _tiled(torch.from_numpy(_values(cell.op, rank)).to(cell.torch_dtype))
    for begin in range(0, tensor.numel(), _BLOCK_NUMEL):
        part = tensor[begin : begin + _BLOCK_NUMEL]
        part.copy_(tile[: part.numel()])


def _count_unequal(tensor: torch.Tensor, period: torch.Tensor, first_idx: int) -> int:
    """Count elements that differ from `period` read from index `first_idx` on."""
    tile = _tiled(period)
    comparable = tensor.dtype if tensor.dtype.itemsize > 1 else torch.float32
    num_wrong = 0
    for begin in range(0, tensor.numel(), _BLOCK_NUMEL):
        part = tensor[begin : begin + _BLOCK_NUMEL].to(comparable)
        offset = (first_idx + begin) % PERIOD
        want = tile[offset : offset + part.numel()].to(comparable)
        num_wrong += int((part != want).sum())
    return num_wrong


def count_wrong(output: torch.Tensor, cell: Cell, rank: int) -> int:
    """Return how many elements of rank's `output` (one dimension) are wrong."""
    dtype, root = cell.torch_dtype, cell.root
    if cell.verb in ("reduce", "gather") and rank != root:
        return 0
    if cell.verb in ("all_reduce", "reduce"):
        return _count_unequal(output, _reduced(cell), 0)
    if cell.verb == "reduce_scatter":
        return _count_unequal(output, _reduced(cell), rank * cell.numel)
    given = [torch.from_numpy(_values(cell.op, r)).to(dtype) for r in range(cell.world_size)]
    if cell.verb == "sendrecv":
        return _count_unequal(output, given[rank - 1], 0)
    first = rank * cell.numel if cell.verb in _GIVE_PARTS else 0
    if cell.verb in ("broadcast", "scatter"):
        return _count_unequal(output, given[root], first)
    parts = output.view(cell.world_size, cell.numel).unbind()
    return sum(_count_unequal(part, want, first) for part, want in zip(parts, given, strict=True))


def neutral(op: str) -> int:
    """Return a number that in-place reductions over and over leave as it is."""
    return 1 if op in ("product", "band") else 0
