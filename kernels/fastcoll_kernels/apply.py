# SPDX-License-Identifier: Apache-2.0
"""Apply an epilogue to a result that lies in memory: the step behind another kernel.

Decides how many programs do so. The value that an epilogue gets is the stored result, so the bits
are those of a kernel that has the epilogue fused. Waits for no rank.

Traffic of S bytes: S read, the output written.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .call import Epilogue, Launch, as_words, check
from .reduce import count_tiles, emit

# Not measured: programs beyond those that a device holds at once start as others end.
_MOST_PROGRAMS = 1024
_OPTIONS = (
    "EPILOGUE",
    "FORMAT",
    "OUT_FORMAT",
    "COLUMNS",
    "BLOCK",
    "num_warps",
    "enable_fp_fusion",
)


@triton.jit
def apply_kernel(
    source,
    out,
    args,
    numel,
    EPILOGUE: tl.constexpr,
    FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    tile = tl.program_id(0).to(tl.int64)
    while tile < count_tiles(numel, COLUMNS):
        index = tile * COLUMNS + lane
        mask = (lane < COLUMNS) & (index < numel)
        word = tl.load(source + index, mask=mask, other=0)
        emit(out, word, index, mask, tile, args, EPILOGUE, FORMAT, OUT_FORMAT)
        tile += tl.num_programs(0)


def _arguments(
    tensor: torch.Tensor, out: torch.Tensor, epilogue: Epilogue | None, launch: Launch | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a launch's arguments, and its options with the grid."""
    if tensor.numel() != out.numel():
        raise ValueError(f"tensor has {tensor.numel()} elements, and out {out.numel()}")
    call = check(tensor.dtype, out.detach(), "SUM", 1, epilogue, launch or Launch())
    options = {name: call.options[name] for name in _OPTIONS}
    tiles = max(1, -(-call.numel // options["COLUMNS"]))
    options["grid"] = (launch.channels if launch else min(tiles, _MOST_PROGRAMS),)
    return (as_words("tensor", tensor.detach()), call.out, call.args, call.numel), options


def apply(
    tensor: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue | None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Store the values of an epilogue for the elements of a tensor, on the current stream.

    Args:
        tensor: The result of a reduction, contiguous.
        out: The memory of the values, contiguous; it may be `tensor`.
        epilogue: None: a cast alone.
        launch: Default: a program for each tile, up to 1024, of 8 warps.

    Returns:
        `out`, not yet written: the stream's work has only been queued.

    Raises:
        ValueError: The call has no meaning; nothing was launched.
    """
    args, options = _arguments(tensor, out, epilogue, launch)
    if tensor.numel():
        apply_kernel[options.pop("grid")](*args, **options)
    return out


def code_of(tensor: torch.Tensor, out: torch.Tensor, epilogue: Epilogue | None) -> Any:
    """Return the compiled kernel of `apply` with these arguments; None in Triton's interpreter.

    Nothing is launched, and a fresh one is not on the device yet.

    Raises:
        ValueError: The call has no meaning.
        Exception: Triton's, of an epilogue that can't be compiled.
    """
    args, options = _arguments(tensor, out, epilogue, None)
    return apply_kernel.warmup(*args, **options)
