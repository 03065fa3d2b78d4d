# SPDX-License-Identifier: Apache-2.0
"""Epilogues: functions that a kernel applies to a reduced tile before it stores the tile.

Decides the arithmetic of scaling, quantisation and normalisation behind a reduction. An epilogue
gets the value that the plain call would return, so that fused and unfused have the same bits. A
user's own is a @triton.jit function of the same form, see call.Epilogue. A cast needs none: give
the launcher an `out` of another dtype.

In a broken group epilogues get NaN, and hand it on.

The result is rounded to the tensor's dtype before an epilogue sees it. So one_shot and two_shot,
fused or not, have the same bits. The price is one rounding, which a separate kernel would have too.
"""

import torch
import triton
import triton.language as tl

from .arithmetic import FLOAT_ABS, FLOAT_INF, narrow, round_to, widen
from .call import Epilogue, Launch, as_words, check

# fp32's smallest normal number: no scale is less, so that a row of zeros gives zeros.
_LEAST_SCALE = tl.constexpr(2.0**-126)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF_OR_SINGLE = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _scale(value, index, mask, row, args):
    return value * args[0]


def scale(factor: float) -> Epilogue:
    """Multiply by a number, in fp32. An average is op="AVG", which divides and rounds otherwise."""
    return Epilogue(_scale, (factor,))


@triton.jit
def _amax_bits(value, mask):
    """The largest |value| as an integer: integers order NaN above infinity."""
    bits = value.to(tl.float32).to(tl.int32, bitcast=True) & FLOAT_ABS
    return tl.max(tl.where(mask, bits, 0), axis=0)


@triton.jit
def _scale_of(amax_bits, largest):
    """The divisor that makes the largest element the format's largest number."""
    quotient = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), largest)
    return tl.where(quotient < _LEAST_SCALE, _LEAST_SCALE, quotient)


@triton.jit
def _quantise_row(value, index, mask, row, args):
    scales, largest = args
    scale = _scale_of(_amax_bits(value, mask), largest)
    tl.store(scales + row, scale)
    return tl.div_rn(value.to(tl.float32), scale)


def _need(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: need contiguous {' or '.join(map(str, dtypes))} of shape {shape}, got "
            f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        )


def quantise_rows(out: torch.Tensor, scales: torch.Tensor) -> Epilogue:
    """Quantise every row (last dimension) to fp8 with a scale of its own.

    A row's scale is amax / the format's largest number, or 2^-126 if that is more. An element is
    value / scale, rounded to nearest even. Both divisions are true ones.

    Args:
        out: The launcher's `out`: float8_e4m3fn or float8_e5m2.
        scales: float32[out.shape[:-1]], written: out * scale is the value.

    Raises:
        ValueError: Shapes or dtypes are others.
    """
    _need("out", out, tuple(out.shape), *_FP8)
    _need("scales", scales, tuple(out.shape[:-1]), torch.float32)
    return Epilogue(_quantise_row, (scales, torch.finfo(out.dtype).max), by_rows=True)


@triton.jit
def _track_amax(value, index, mask, row, args):
    tl.atomic_max(args[0], _amax_bits(value, mask), sem="relaxed")
    return value


def track_amax(amax: torch.Tensor) -> Epilogue:
    """Store the result, and raise `amax` to its largest magnitude: the first half of `quantise`.

    Args:
        amax: float32[1], zeroed before; NaN counts as the largest.

    Raises:
        ValueError: It has another shape or dtype.
    """
    _need("amax", amax, (1,), torch.float32)
    return Epilogue(_track_amax, (amax.view(torch.int32),))


@triton.jit
def quantise_kernel(
    source,
    amax_bits,
    largest,
    scale,
    out,
    numel,
    FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    divisor = _scale_of(tl.load(amax_bits), largest)
    if tl.program_id(0) == 0:
        tl.store(scale, divisor)
    tile = tl.program_id(0).to(tl.int64)
    while tile * BLOCK < numel:
        index = tile * BLOCK + tl.arange(0, BLOCK)
        value = widen(tl.load(source + index, mask=index < numel, other=0), FORMAT).to(tl.float32)
        tl.store(out + index, narrow(tl.div_rn(value, divisor), OUT_FORMAT), mask=index < numel)
        tile += tl.num_programs(0)


def quantise(
    tensor: torch.Tensor,
    amax: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Quantise a tensor to fp8 with one scale, on the current stream; arithmetic of quantise_rows.

    It is a launch of its own, behind one with `track_amax`. The largest element is known only when
    the last tile has been reduced, and programs don't wait for each other.

    Args:
        tensor: The result of the launch before.
        amax: float32[1], tracked by that launch.
        out: float8_e4m3fn or float8_e5m2, of the shape of `tensor`.
        scale: float32[1], written: out * scale is the value.
        launch: Default: 16 programs of 8 warps.

    Returns:
        `out`, not yet written: the stream's work has only been queued.

    Raises:
        ValueError: Shapes or dtypes are others; nothing was launched.
    """
    _need("amax", amax, (1,), torch.float32)
    _need("scale", scale, (1,), torch.float32)
    _need("out", out, tuple(tensor.shape), *_FP8)
    call = check(tensor.dtype, out, "SUM", 1, None, launch or Launch())
    options = {name: call.options[name] for name in ("FORMAT", "OUT_FORMAT", "BLOCK", "num_warps")}
    quantise_kernel[(call.channels,)](
        as_words("tensor", tensor),
        amax.view(torch.int32),
        torch.finfo(out.dtype).max,
        scale,
        call.out,
        call.numel,
        enable_fp_fusion=False,
        **options,
    )
    return out


@triton.jit
def _wide(value):
    """fp32 of fp32, fp16 or bf16: of bf16 by its bits, as the interpreter errs in subnormals."""
    if value.dtype == tl.bfloat16:
        return widen(value.to(tl.int16, bitcast=True), "bfloat16")
    else:
        return value.to(tl.float32)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _mean_of_squares(value, mask, columns, log_columns):
    """The mean of a row's squares, which no order of the sum can change: docs/numerics.md.

    Each square is rounded to a multiple of one unit. fp64 holds every sum of these multiples.
    """
    bits = _amax_bits(value, mask)
    largest = bits.to(tl.float32, bitcast=True)
    exponent = (largest.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
    unit = 2 * (exponent + 1) + log_columns - 53
    magic = 1.5 * _power_of_two(unit + 52)  # adding it rounds to a multiple of the unit
    wide = tl.where(mask, value, 0.0).to(tl.float64)
    total = tl.sum((wide * wide + magic) - magic, axis=0)
    mean = (total / tl.full((), columns, tl.float64)).to(tl.float32)
    return tl.where((bits == 0) | (bits >= FLOAT_INF), largest, mean)


@triton.jit
def _add_rms_norm(value, index, mask, row, args):
    residual, summed, weight, epsilon, columns, log_columns = args
    total = value + _wide(tl.load(residual + index, mask=mask, other=0.0))
    total = round_to(total, summed.dtype.element_ty)
    tl.store(summed + index, total, mask=mask)
    total = tl.where(mask, _wide(total), 0.0)
    mean = _mean_of_squares(total, mask, columns, log_columns)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))
    column = tl.arange(0, total.shape[0])
    factor = _wide(tl.load(weight + column, mask=mask, other=0.0))
    return (total * inverse) * factor


def add_rms_norm(
    out: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float = 1e-6,
    summed: torch.Tensor | None = None,
) -> Epilogue:
    """Add a residual and normalise each row: all_reduce -> add -> RMSNorm in one kernel.

    The sum is summed = result + residual, rounded to the residual's dtype. The output is
    out = summed / sqrt(mean(summed^2) + epsilon) * weight, in fp32, rounded once. (Zhang and
    Sennrich, Root Mean Square Layer Normalization, 2019.) Both have the bits of fastcoll.RMSNorm
    on CPUs, which docs/numerics.md defines.

    Args:
        out: The launcher's `out`, float32, float16 or bfloat16: [..., columns].
        residual: float32, float16 or bfloat16, of the shape of `out`.
        weight: float32, float16 or bfloat16: [columns].
        epsilon: Added to the mean of the squares.
        summed: The new residual, of the residual's shape and dtype; default: the residual itself.

    Raises:
        ValueError: Shapes or dtypes are others.
    """
    summed = residual if summed is None else summed
    shape = tuple(out.shape)
    _need("out", out, shape, *_HALF_OR_SINGLE)
    _need("residual", residual, shape, *_HALF_OR_SINGLE)
    _need("summed", summed, shape, residual.dtype)
    _need("weight", weight, shape[-1:], *_HALF_OR_SINGLE)
    log_columns = max(2, (shape[-1] - 1).bit_length())
    args = (residual, summed, weight, epsilon, shape[-1], log_columns)
    return Epilogue(_add_rms_norm, args, by_rows=True)
