# SPDX-License-Identifier: Apache-2.0
"""A launcher's call: checked, and put into the kernels' terms.

Decides which calls are valid, and names the mistake of one that isn't. Decides, too, how tensors
become words, and how a message is cut into tiles and chunks. Knows no memory but the call's
tensors.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .workspace import PACK_BYTES, Workspace

# Elements as kernels load them: floating-point numbers as integers of their bits.
WORDS: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.bool: torch.uint8,
    torch.int8: torch.int8,
    torch.uint8: torch.uint8,
    torch.int16: torch.int16,
    torch.uint16: torch.uint16,
    torch.int32: torch.int32,
    torch.uint32: torch.uint32,
    torch.int64: torch.int64,
    torch.uint64: torch.uint64,
}
_FLOAT_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
_INTEGER_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
# On 0 and 1.
_BOOL_OPS = {
    "SUM": "BOR",
    "MAX": "BOR",
    "PRODUCT": "BAND",
    "MIN": "BAND",
    **{op: op for op in ("BAND", "BOR", "BXOR")},
}
_THREADS_PER_WARP = 32
# The chunks of an uncut message are multiples of so many elements: a pack of the narrowest type.
_CHUNK_STEP = 16


@dataclass(frozen=True)
class Launch:
    """The shape of a launch; equal on all ranks.

    Attributes:
        channels: Programs (thread blocks); at most the workspace's num_channels. A program waits
            for that of its number on every rank: where ranks share a device, all must fit at once.
        num_warps: Warps of each; by rows no more than a row has packs for.
        block: Elements of a tile, a power of two; None: one pack for each thread. By rows, a tile
            is a row with any value here.

    Raises:
        ValueError: On construction, for a value out of range.
    """

    channels: int = 16
    num_warps: int = 8
    block: int | None = None

    def __post_init__(self) -> None:
        for name in ("channels", "num_warps", "block"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: need 1 or more")
        for name in ("num_warps", "block"):
            value = getattr(self, name)
            if value is not None and value & (value - 1):
                raise ValueError(f"{name}={value}: need a power of two")


@dataclass(frozen=True)
class Epilogue:
    """A function on the elements of a result, applied before they are stored.

    Attributes:
        function: A @triton.jit function (value, index, mask, row, args) -> value to store. The
            `value` is a tile of the result, rounded to the input's dtype as in the plain call. It
            has the type of the accumulators (fp32 for half types and fp8). The `index` has the
            positions of its elements in the output, valid where `mask`. The `row` is the number of
            the row, if `by_rows`. The function may load and store more through pointers in `args`.
        args: Its last argument: tensors and numbers.
        by_rows: A tile is a row, the last dimension of the output; else it is any BLOCK elements.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    by_rows: bool = False


@dataclass(frozen=True)
class Call:
    """A checked call.

    Attributes:
        result: The launcher's return value.
        out: Its words.
        numel: Their number.
        chunk_numel: Words per rank if the message is cut among the ranks.
        block: Lanes of a tile.
        channels: Programs.
        args: The epilogue's arguments.
        format: Name of the input's dtype.
        options: Compile-time arguments and launch options.
    """

    result: torch.Tensor
    out: torch.Tensor
    numel: int
    chunk_numel: int
    block: int
    channels: int
    args: tuple[Any, ...]
    format: str
    options: dict[str, Any]

    @property
    def word_type(self) -> tl.dtype:
        """The type of the words that kernels load."""
        return getattr(tl, _name(WORDS[getattr(torch, self.format)]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kernel_op(dtype: torch.dtype, op: str) -> str:
    known: Iterable[str] = _FLOAT_OPS if dtype.is_floating_point else _INTEGER_OPS
    if dtype.is_complex:
        known = ("SUM", "AVG")
    elif dtype is torch.bool:
        known = _BOOL_OPS
    if op not in known:
        raise ValueError(f"{op} of {dtype}: need one of {', '.join(known)}")
    return _BOOL_OPS[op] if dtype is torch.bool else op


def _real(dtype: torch.dtype) -> torch.dtype:
    """The type of a component."""
    real = dtype.to_real() if dtype.is_complex else dtype
    if real not in WORDS:
        raise ValueError(f"no kernel for {dtype}")
    return real


def as_words(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as the one-dimensional array of words that kernels take.

    Raises:
        ValueError: It isn't contiguous, or its dtype has no kernel.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: need a contiguous tensor, got strides {tensor.stride()}")
    real = _real(tensor.dtype)
    return tensor.reshape(-1).view(real).view(WORDS[real])


@dataclass(frozen=True)
class _Tile:
    """A tile's elements and lanes, its warps, and the step of a chunk's size."""

    columns: int
    block: int
    num_warps: int
    chunk_step: int


def _cut_tiles(
    dtype: torch.dtype, out: torch.Tensor, epilogue: Epilogue | None, launch: Launch
) -> _Tile:
    warp_numel = _THREADS_PER_WARP * PACK_BYTES // _real(dtype).itemsize
    if epilogue is None or not epilogue.by_rows:
        block = launch.block or launch.num_warps * warp_numel
        return _Tile(block, block, launch.num_warps, _CHUNK_STEP)
    if out.dim() < 1 or out.shape[-1] < 1:
        raise ValueError(f"an epilogue by rows: need rows, got shape {tuple(out.shape)}")
    columns = out.shape[-1]
    block = triton.next_power_of_2(columns)
    num_warps = min(launch.num_warps, max(1, block // warp_numel))
    return _Tile(columns, block, num_warps, columns)


def check(
    dtype: torch.dtype,
    out: torch.Tensor,
    op: str,
    world_size: int,
    epilogue: Epilogue | None,
    launch: Launch,
) -> Call:
    """Check the facts of a call that do not depend on the place of the input.

    Args:
        dtype: Of the input.
        out: The memory of the result.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        world_size: Number of inputs.
        epilogue: A function fused behind the reduction.
        launch: Shape of the launch.

    Raises:
        ValueError: The call has no meaning; the text says why.
    """
    if dtype != out.dtype and not (dtype.is_floating_point and out.dtype.is_floating_point):
        raise ValueError(f"input of {dtype}, out of {out.dtype}: only floats can be cast")
    if dtype.is_complex and epilogue is not None:
        raise ValueError(f"an epilogue of {dtype}: need real numbers")
    if world_size < 1:
        raise ValueError("nothing to reduce: need one address or more")
    flat = as_words("out", out)
    numel = flat.numel()
    tile = _cut_tiles(dtype, out, epilogue, launch)
    name = _name(_real(dtype))
    options = {
        "OP": _kernel_op(dtype, op),
        "FORMAT": name,
        "OUT_FORMAT": _name(_real(out.dtype)),
        "EPILOGUE": epilogue.function if epilogue else None,
        "WORLD": world_size,
        "COLUMNS": tile.columns,
        "BLOCK": tile.block,
        "num_warps": tile.num_warps,
        # The arithmetic has no fused multiply-add.
        "enable_fp_fusion": False,
    }
    return Call(
        result=out,
        out=flat,
        numel=numel,
        chunk_numel=-(-numel // (world_size * tile.chunk_step)) * tile.chunk_step,
        block=tile.block,
        channels=launch.channels,
        args=epilogue.args if epilogue else (),
        format=name,
        options=options,
    )


def check_collective(
    tensor: torch.Tensor,
    out: torch.Tensor,
    op: str,
    workspace: Workspace,
    epilogue: Epilogue | None,
    launch: Launch | None,
    parts: int = 1,
) -> tuple[Call, torch.Tensor]:
    """Check a call over a workspace; return it with the words of this rank's input.

    Args:
        tensor: This rank's input.
        out: The memory of the result.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        workspace: The ranks' shared memory.
        epilogue: A function fused behind the reduction.
        launch: Shape of the launch; None: all channels.
        parts: How many times the output's elements the input has.

    Raises:
        ValueError: The call has no meaning; the text says why.
    """
    launch = launch or Launch(channels=workspace.num_channels)
    if launch.channels > workspace.num_channels:
        raise ValueError(f"{launch.channels} channels: the workspace has {workspace.num_channels}")
    if tensor.numel() != parts * out.numel():
        raise ValueError(
            f"input of shape {tuple(tensor.shape)}, out of shape {tuple(out.shape)}: need "
            f"{parts * out.numel()} elements, got {tensor.numel()}"
        )
    call = check(tensor.dtype, out, op, workspace.world_size, epilogue, launch)
    return call, as_words("input", tensor)


def launch_collective(
    kernel: Any,
    call: Call,
    source: torch.Tensor,
    workspace: Workspace,
    *,
    tile: tuple[int, int],
    scatter: bool | None = None,
) -> torch.Tensor:
    """Queue a kernel on the current stream, unless nothing is to be done; return the result.

    Args:
        kernel: A @triton.jit function of (group, source, out, args, numel, segment_tiles, ...), or
            with chunk_numel behind numel.
        call: The checked call.
        source: The words of this rank's input.
        workspace: The ranks' shared memory.
        tile: Elements of a tile in scratch, and bytes of each.
        scatter: Whether a rank keeps its chunk alone; None for a kernel that cuts no chunks.

    Raises:
        ValueError: The workspace holds no tile; nothing was launched.
    """
    if call.numel:
        chunk = () if scatter is None else (call.numel if scatter else call.chunk_numel,)
        kernel[(call.channels,)](
            workspace.group(),
            source,
            call.out,
            call.args,
            source.numel(),
            *chunk,
            workspace.tiles_per_buffer(*tile),
            **({} if scatter is None else {"SCATTER": scatter}),
            **call.options,
        )
    return call.result
