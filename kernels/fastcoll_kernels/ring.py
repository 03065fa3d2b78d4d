# SPDX-License-Identifier: Apache-2.0
"""all_reduce and reduce_scatter by ring: data and progress go to the neighbours only.

Chunk c is summed in the order c+1, ..., c (mod n) and not in that of the ranks. So floating-point
sums and products differ in bits from the other algorithms'. Partials travel as accumulators: half
types and fp8 round once.

Traffic per rank, S bytes and n ranks, partials p times as wide as elements. A reduce_scatter moves
S + 2 p S (n-1)/n + S/n: S read, a partial written and read per step, a chunk written. An all_reduce
moves another 3 S (n-1)/n + S/n: a chunk written to the neighbour, read and stored per step.
"""

import torch
import triton
import triton.language as tl

from .arithmetic import combine, finish, widen
from .call import Call, Epilogue, Launch, check_collective, launch_collective
from .reduce import count_tiles, drain, emit
from .signal import (
    LANDED,
    PUTS,
    TAKEN,
    buffer,
    is_sound,
    own_rank,
    own_words,
    pointer,
    store_release,
    wait,
    words,
)
from .workspace import Workspace


@triton.jit
def _turn(group, alive, put, WORLD: tl.constexpr):
    """Wait until put - 1 has landed here, and `put` may overwrite the right neighbour's buffer."""
    channel = tl.program_id(0)
    own = own_words(group)
    left = (own_rank(group) + WORLD - 1) % WORLD
    right = (own_rank(group) + 1) % WORLD
    alive = wait(group, alive, own + LANDED + channel, put - 1, left, WORLD)
    alive = wait(group, alive, own + TAKEN + channel, put - 2, right, WORLD)
    tl.debug_barrier()  # so that no thread reads or writes ahead of the acquire
    return alive


@triton.jit
def _pass_on(group, put, is_last, WORLD: tl.constexpr):
    """Publish to the left that put - 1 is consumed, and to the right that `put` is there, if so."""
    channel = tl.program_id(0)
    tl.debug_barrier()  # so that the releases cover the loads and stores of the whole block
    store_release(words(group, (own_rank(group) + WORLD - 1) % WORLD) + TAKEN + channel, put - 1)
    if not is_last:
        store_release(words(group, (own_rank(group) + 1) % WORLD) + LANDED + channel, put)


@triton.jit
def ring_kernel(  # noqa: C901 - the three phases share one loop
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
    last_hop: tl.constexpr = WORLD - 1 if SCATTER else 2 * (WORLD - 1)
    lane = tl.arange(0, BLOCK)
    inside = lane < COLUMNS
    step = tl.num_programs(0)
    right = (own_rank(group) + 1) % WORLD
    num_tiles = count_tiles(chunk_numel, COLUMNS)  # of each chunk
    counter = own_words(group) + PUTS + tl.program_id(0)
    puts = tl.load(counter)
    alive = is_sound(group)
    first = tl.program_id(0).to(tl.int64)
    while (first < num_tiles) & (alive != 0):
        last = tl.minimum(first + segment_tiles * step, num_tiles)
        hop = 0
        while (hop <= last_hop) & (alive != 0):
            # Hops 0 to n-1 reduce: add mine to the partial that landed. From hop n-1 on there are
            # results. Both go to the right, which has two buffers to land in.
            put = puts + hop + 1
            alive = _turn(group, alive, put, WORLD)
            if alive != 0:
                chunk = (own_rank(group) + 2 * WORLD - 1 - hop) % WORLD
                landed = buffer(group, 2 + ((put - 1) & 1))
                target = buffer(group, 2 + (put & 1))
                at = 0
                tile = first
                while tile < last:
                    column = tile * COLUMNS + lane
                    index = chunk.to(tl.int64) * chunk_numel + column
                    mask = inside & (column < chunk_numel) & (index < numel)
                    if hop < WORLD:
                        value = widen(tl.load(source + index, mask=mask, other=0), FORMAT)
                        if hop > 0:
                            partial = pointer(group.scratch, own_rank(group), landed, value.dtype)
                            value = combine(
                                tl.load(partial + at + lane, mask=inside, other=0), value, OP
                            )
                        if hop < WORLD - 1:
                            partial = pointer(group.scratch, right, target, value.dtype)
                            tl.store(partial + at + lane, value, mask=inside)
                        word = finish(value, OP, FORMAT, WORLD)
                    else:
                        result = pointer(group.scratch, own_rank(group), landed, dtype)
                        word = tl.load(result + at + lane, mask=inside, other=0)
                    if hop >= WORLD - 1:
                        row = chunk * (chunk_numel // COLUMNS) + tile
                        if SCATTER:
                            row = tile
                            index = column
                        emit(out, word, index, mask, row, args, EPILOGUE, FORMAT, OUT_FORMAT)
                        if hop < last_hop:
                            result = pointer(group.scratch, right, target, dtype)
                            tl.store(result + at + lane, word, mask=inside)
                    at += BLOCK
                    tile += step
                _pass_on(group, put, hop == last_hop, WORLD)
                hop += 1
        if alive != 0:
            puts += last_hop
            first += segment_tiles * step
    tl.store(counter, puts)
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
    """As one_shot.all_reduce, but for the order of the sums."""
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
    """As two_shot.reduce_scatter, but for the order of the sums."""
    parts = workspace.world_size
    call, source = check_collective(tensor, out, op, workspace, epilogue, launch, parts)
    return _launch(call, source, workspace, scatter=True)


def _launch(call: Call, source: torch.Tensor, workspace: Workspace, scatter: bool) -> torch.Tensor:
    tile = call.block, call.accumulator_bytes
    return launch_collective(ring_kernel, call, source, workspace, tile=tile, scatter=scatter)
