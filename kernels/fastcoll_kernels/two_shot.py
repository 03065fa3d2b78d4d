# SPDX-License-Identifier: Apache-2.0
"""all_reduce and reduce_scatter by two_shot: rank r reduces chunk r, in the order of ranks.

Traffic per rank, S bytes and n ranks. all_reduce: (5 + 1/n) S: S read and written to
stage, S read to reduce, S/n written, S read from the reducing ranks, S written. Two meetings
per segment. reduce_scatter (S: the whole input): (3 + 1/n) S, one meeting.
"""

import torch
import triton
import triton.language as tl

from .call import Call, Epilogue, Launch, check_collective, launch_collective
from .reduce import count_tiles, drain, emit, reduce_tile
from .signal import EPOCH, buffer, is_sound, meet, own_rank, own_words, pointer
from .workspace import Workspace


@triton.jit
def two_shot_kernel(  # noqa: C901 - one kernel for two verbs
    group,
    source,
    out,
    args,
    numel,
    chunk_numel,
    segment_tiles,
    SCATTER: tl.constexpr,
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
    inside = lane < COLUMNS
    step = tl.num_programs(0)
    num_tiles = count_tiles(chunk_numel, COLUMNS)  # of each chunk
    counter = own_words(group) + EPOCH + tl.program_id(0)
    epoch = tl.load(counter)
    alive = is_sound(group)
    first = tl.program_id(0).to(tl.int64)
    while (first < num_tiles) & (alive != 0):
        last = tl.minimum(first + segment_tiles * step, num_tiles)
        # 1. Stage tile `first`, ... of every chunk, chunk by chunk.
        staged = buffer(group, (epoch >> 1) & 1)
        own = pointer(group.scratch, own_rank(group), staged, dtype)
        at = 0
        tile = first
        while tile < last:
            column = tile * COLUMNS + lane
            for chunk in tl.static_range(WORLD):
                index = tl.full((), chunk, tl.int64) * chunk_numel + column
                mask = inside & (column < chunk_numel) & (index < numel)
                word = tl.load(source + index, mask=mask, other=0)
                tl.store(own + at + chunk * BLOCK + lane, word, mask=inside)
            at += WORLD * BLOCK
            tile += step
        # 2. Meet: all have staged this segment, and are through with the one before.
        alive = meet(group, epoch + 1, WORLD)
        if alive != 0:
            # 3. Reduce my chunk; for the others in place: of my scratch only I read this chunk.
            at = own_rank(group) * BLOCK
            tile = first
            while tile < last:
                word = reduce_tile(
                    group.scratch, staged, at + lane, inside, OP, FORMAT, WORLD, dtype
                )
                if SCATTER:
                    column = tile * COLUMNS + lane
                    mask = inside & (column < chunk_numel)
                    emit(out, word, column, mask, tile, args, EPILOGUE, FORMAT, OUT_FORMAT)
                else:
                    tl.store(own + at + lane, word, mask=inside)
                at += WORLD * BLOCK
                tile += step
            if not SCATTER:
                # 4. Meet: all have reduced.
                alive = meet(group, epoch + 2, WORLD)
        if alive != 0:
            if not SCATTER:
                # 5. Take every chunk from its rank.
                at = 0
                tile = first
                while tile < last:
                    column = tile * COLUMNS + lane
                    for chunk in tl.static_range(WORLD):
                        index = tl.full((), chunk, tl.int64) * chunk_numel + column
                        mask = inside & (column < chunk_numel) & (index < numel)
                        peer = pointer(group.scratch, chunk, staged, dtype)
                        word = tl.load(peer + at + chunk * BLOCK + lane, mask=inside, other=0)
                        row = chunk * (chunk_numel // COLUMNS) + tile
                        emit(out, word, index, mask, row, args, EPILOGUE, FORMAT, OUT_FORMAT)
                    at += WORLD * BLOCK
                    tile += step
            first += segment_tiles * step
        # A segment takes two epochs, so that the two buffers alternate.
        epoch += 2
    tl.store(counter, epoch)
    if alive == 0:
        chunks: tl.constexpr = 1 if SCATTER else WORLD
        drain(
            group, out, first, numel, chunk_numel, args,
            chunks, EPILOGUE, FORMAT, OUT_FORMAT, COLUMNS, BLOCK,
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
    """As one_shot.all_reduce, bit for bit."""
    out = tensor if out is None else out
    call, source = check_collective(tensor, out, op, workspace, epilogue, launch)
    return _launch(call, source, workspace, scatter=False)


def reduce_scatter(
    out: torch.Tensor,
    tensor: torch.Tensor,
    workspace: Workspace,
    op: str = "SUM",
    *,
    epilogue: Epilogue | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Reduce a tensor over all ranks and keep chunk `rank`, on the current stream.

    Collective: every rank launches it in the same order with equal arguments, see workspace.py.

    Args:
        out: The memory of this rank's chunk, contiguous; any shape.
        tensor: This rank's part, contiguous: world_size times the elements of `out`.
        workspace: The ranks' shared memory.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        epilogue: Applied to the chunk before it is stored; positions and rows are those of `out`.
        launch: Default: workspace.num_channels programs of 8 warps.

    Returns:
        `out`, not yet written: the stream's work has only been queued.

    Raises:
        ValueError: The call has no meaning or does not fit the workspace; nothing was launched.
    """
    parts = workspace.world_size
    call, source = check_collective(tensor, out, op, workspace, epilogue, launch, parts)
    return _launch(call, source, workspace, scatter=True)


def _launch(call: Call, source: torch.Tensor, workspace: Workspace, scatter: bool) -> torch.Tensor:
    # A tile of every chunk lies in one buffer.
    tile = call.block * workspace.world_size, source.element_size()
    return launch_collective(two_shot_kernel, call, source, workspace, tile=tile, scatter=scatter)
