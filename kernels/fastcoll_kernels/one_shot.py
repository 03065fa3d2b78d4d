# SPDX-License-Identifier: Apache-2.0
"""all_reduce by one_shot: every rank reduces everything, in the order of ranks.

Traffic per rank, S bytes and n ranks: (n + 3) S. S read and written to stage, n S read (all but S
of it from peers), S written. One meeting per segment.
"""

import torch
import triton
import triton.language as tl

from .call import Epilogue, Launch, check_collective, launch_collective
from .reduce import count_tiles, drain, emit, reduce_tile
from .signal import EPOCH, buffer, is_sound, meet, own_rank, own_words, pointer
from .workspace import Workspace


@triton.jit
def all_reduce_kernel(
    group,
    source,
    out,
    args,
    numel,
    segment_tiles,
    OP: tl.constexpr,
    FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    WORLD: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = source.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    step = tl.num_programs(0)
    num_tiles = count_tiles(numel, COLUMNS)
    counter = own_words(group) + EPOCH + tl.program_id(0)
    epoch = tl.load(counter)
    alive = is_sound(group)
    first = tl.program_id(0).to(tl.int64)
    while (first < num_tiles) & (alive != 0):
        last = tl.minimum(first + segment_tiles * step, num_tiles)
        # 1. Stage my tiles. A segment takes two epochs, so that the two buffers alternate.
        staged = buffer(group, (epoch >> 1) & 1)
        own = pointer(group.scratch, own_rank(group), staged, dtype)
        at = 0
        tile = first
        while tile < last:
            index = tile * COLUMNS + lane
            word = tl.load(source + index, mask=(lane < COLUMNS) & (index < numel), other=0)
            tl.store(own + at + lane, word, mask=lane < COLUMNS)
            at += BLOCK
            tile += step
        # 2. Meet: all have staged this segment, and are through with the one before.
        epoch += 2
        alive = meet(group, epoch, WORLD)
        if alive != 0:
            # 3. Reduce everything.
            at = 0
            tile = first
            while tile < last:
                index = tile * COLUMNS + lane
                word = reduce_tile(
                    group.scratch, staged, at + lane, lane < COLUMNS, OP, FORMAT, WORLD, dtype
                )
                mask = (lane < COLUMNS) & (index < numel)
                emit(out, word, index, mask, tile, args, EPILOGUE, FORMAT, OUT_FORMAT)
                at += BLOCK
                tile += step
            first += segment_tiles * step
    tl.store(counter, epoch)
    if alive == 0:
        drain(
            group, out, first, numel, numel, args,
            1, EPILOGUE, FORMAT, OUT_FORMAT, COLUMNS, BLOCK,
        )  # fmt: skip


def all_reduce(
    tensor: torch.Tensor,
    workspace: Workspace,
    op: str = "SUM",
    *,
    out: torch.Tensor | None = None,
    epilogue: Epilogue | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Reduce a tensor over all ranks on the current stream.

    Collective: every rank launches it in the same order with equal arguments, see workspace.py.

    Args:
        tensor: This rank's part, contiguous; any shape.
        workspace: The ranks' shared memory.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        out: Where the result goes; default: `tensor` itself. A float of another dtype rounds the
            result a second time, to that.
        epilogue: Applied to the result before it is stored.
        launch: Default: workspace.num_channels programs of 8 warps.

    Returns:
        `out`, not yet written: the stream's work has only been queued.

    Raises:
        ValueError: The call has no meaning or does not fit the workspace; nothing was launched.
    """
    out = tensor if out is None else out
    call, source = check_collective(tensor, out, op, workspace, epilogue, launch)
    tile = call.block, source.element_size()
    return launch_collective(all_reduce_kernel, call, source, workspace, tile=tile)
