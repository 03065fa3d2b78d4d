# SPDX-License-Identifier: Apache-2.0
"""Reduce tiles of n ranks' memory and store the result, or its value after an epilogue.

Decides the order of the sources (that of the ranks) and the arguments of an epilogue. The kernel of
this file waits for no rank: its launcher knows that the sources are there (the copy-engine path).
Their addresses are arguments of the launch, so a captured one keeps them. The algorithms use its
parts behind their own waits.

Traffic of `reduce`, S bytes and n sources: n S read, S written.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .arithmetic import combine, finish, is_float, narrow, widen
from .call import Epilogue, Launch, check
from .signal import pointer, report


@triton.jit
def reduce_tile(
    table,
    offset_bytes,
    index,
    mask,
    OP: tl.constexpr,
    FORMAT: tl.constexpr,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The elements of the result at `index`, counted from the same offset of every address."""
    first = pointer(table, 0, offset_bytes, DTYPE)
    total = widen(tl.load(first + index, mask=mask, other=0), FORMAT)
    for rank in tl.static_range(1, WORLD):
        source = pointer(table, rank, offset_bytes, DTYPE)
        value = widen(tl.load(source + index, mask=mask, other=0), FORMAT)
        total = combine(total, value, OP)
    return finish(total, OP, FORMAT, WORLD)


@triton.jit
def emit(
    out,
    word,
    index,
    mask,
    row,
    args,
    EPILOGUE: tl.constexpr,
    FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
):
    """Store a tile of the result, or its value after the epilogue."""
    if EPILOGUE is not None:
        value = EPILOGUE(widen(word, FORMAT), index, mask, row, args)
        word = narrow(value, OUT_FORMAT)
    elif FORMAT != OUT_FORMAT:
        word = narrow(widen(word, FORMAT), OUT_FORMAT)
    tl.store(out + index, word, mask=mask)


@triton.jit
def count_tiles(numel, COLUMNS: tl.constexpr):
    """Return how many tiles that makes. In 64 bits: just below 2^31 it would wrap, rounded up."""
    return tl.cdiv(tl.full((), numel, tl.int64), COLUMNS)


@triton.jit
def drain(
    group,
    out,
    tile,
    numel,
    chunk_numel,
    args,
    CHUNKS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Leave a broken group: report it, and store NaN in this program's tiles from `tile` on.

    Epilogues get the NaN as their value. Where elements are integers the output stays as it is.
    """
    report(group)
    if is_float(FORMAT):
        lane = tl.arange(0, BLOCK)
        nan = tl.full((BLOCK,), float("nan"), tl.float64 if FORMAT == "float64" else tl.float32)
        while tile < count_tiles(chunk_numel, COLUMNS):
            column = tile * COLUMNS + lane
            for chunk in tl.static_range(CHUNKS):
                index = tl.full((), chunk, tl.int64) * chunk_numel + column
                mask = (lane < COLUMNS) & (column < chunk_numel) & (index < numel)
                row = chunk * (chunk_numel // COLUMNS) + tile
                word = narrow(nan, FORMAT)
                emit(out, word, index, mask, row, args, EPILOGUE, FORMAT, OUT_FORMAT)
            tile += tl.num_programs(0)


@triton.jit
def reduce_kernel(
    sources,
    out,
    args,
    numel,
    OP: tl.constexpr,
    FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    WORLD: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    tile = tl.program_id(0).to(tl.int64)
    while tile < count_tiles(numel, COLUMNS):
        index = tile * COLUMNS + lane
        mask = (lane < COLUMNS) & (index < numel)
        word = reduce_tile(sources, 0, index, mask, OP, FORMAT, WORLD, DTYPE)
        emit(out, word, index, mask, tile, args, EPILOGUE, FORMAT, OUT_FORMAT)
        tile += tl.num_programs(0)


def _arguments(
    sources: Sequence[int],
    out: torch.Tensor,
    op: str,
    dtype: torch.dtype | None,
    epilogue: Epilogue | None,
    launch: Launch | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a launch's arguments, and its options with the grid."""
    call = check(dtype or out.dtype, out, op, len(sources), epilogue, launch or Launch())
    options = {**call.options, "DTYPE": call.word_type, "grid": (call.channels,)}
    return (tuple(sources), call.out, call.args, call.numel), options


def reduce(
    sources: Sequence[int],
    out: torch.Tensor,
    op: str = "SUM",
    *,
    dtype: torch.dtype | None = None,
    epilogue: Epilogue | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Reduce n arrays that this device can read into one, on the current stream; waits for no rank.

    Args:
        sources: Their addresses in the order of ranks, aligned to 16.
        out: The memory of the result, contiguous; the arrays have as many elements.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        dtype: Of the arrays, if it is another float than that of `out`: the result is rounded to
            this, and from this to that of `out`.
        epilogue: Applied to the result before it is stored.
        launch: Default: 16 programs of 8 warps.

    Returns:
        `out`, not yet written: the stream's work has only been queued.

    Raises:
        ValueError: The call has no meaning; nothing was launched.
    """
    args, options = _arguments(sources, out, op, dtype, epilogue, launch)
    if out.numel():
        reduce_kernel[options.pop("grid")](*args, **options)
    return out


def code_of(sources: Sequence[int], out: torch.Tensor, op: str) -> Any:
    """Return the compiled kernel of `reduce` with these arguments; None in Triton's interpreter.

    Nothing is launched, and a fresh one is not on the device yet.

    Raises:
        ValueError: The call has no meaning.
        Exception: Triton's, of its compiler.
    """
    args, options = _arguments(sources, out, op, None, None, None)
    return reduce_kernel.warmup(*args, **options)
