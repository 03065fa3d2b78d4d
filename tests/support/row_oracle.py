# SPDX-License-Identifier: Apache-2.0
"""The expected result of `then=fastcoll.RMSNorm(...)`, bit for bit, in integers and plain NumPy.

Decides the bits of a row that is added to a residual, normalised, scaled and quantised. Written
from the definition on docs/numerics.md, never from the library's source. It must not know how the
library computes, nor import it.

Sums of squares are sums of integers here, so they have no order. Values travel as raw bits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.oracle import FLOATS, Bits, decode, encode

Floats = np.ndarray[Any, np.dtype[np.float32]]
MOST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # the largest code of a quantised row


@dataclass(frozen=True)
class Norm:
    """The numbers of a norm, and its weight: bits of a dtype; None is ones."""

    eps: float = 1e-6
    offset: float = 0.0
    rounds_first: bool = False
    wide_sum: bool = False
    weight: Bits | None = None
    weight_dtype: str = "float32"

    def factors(self, columns: int) -> Floats:
        """Return the factor of each column, in float32."""
        ones = np.ones(columns, np.float32)
        weight = ones if self.weight is None else decode(self.weight, self.weight_dtype)
        return np.asarray(weight + np.float32(self.offset), np.float32)


def rounded(values: Floats, dtype: str) -> Floats:
    """Return values as the dtype holds them, in float32."""
    return np.asarray(decode(encode(values, dtype), dtype), np.float32)


def add(x: Bits, residual: Bits | None, dtype: str) -> Bits:
    """Return the sum with a residual, rounded to the dtype; without one `x` itself."""
    if residual is None:
        return x.copy()
    with np.errstate(all="ignore"):
        return encode(np.asarray(decode(x, dtype) + decode(residual, dtype), np.float32), dtype)


def count_squares(rows: Floats) -> tuple[Any, Any]:
    """Return the sum of each finite row's squares: a count, and the unit's binary exponent.

    A square is rounded to a multiple of the unit, to nearest with ties to even.
    """
    fraction, exponent = np.frexp(rows.astype(np.float64))
    digits = np.ldexp(fraction, 24).astype(np.int64)  # row = digits * 2**(exponent - 24)
    # The largest of a row is in 2**[top - 1, top).
    _, top = np.frexp(np.abs(rows).max(-1).astype(np.float64))
    log_columns = max(2, (rows.shape[-1] - 1).bit_length())
    unit = 2 * top.astype(np.int64) + log_columns - 53
    shift = 2 * (exponent.astype(np.int64) - 24) - unit[..., None]
    squares = digits * digits
    left = squares << np.clip(shift, 0, 63)
    down = np.clip(-shift, 1, 62)
    kept, rest = squares >> down, squares & ((np.int64(1) << down) - 1)
    half = np.int64(1) << (down - 1)
    kept += (rest > half) | ((rest == half) & (kept & 1 == 1))
    return np.where(shift >= 0, left, kept).sum(-1), unit


def mean_of_squares(rows: Floats) -> Any:
    """Return the mean of each row's squares; of one that is not finite, its largest magnitude."""
    largest = np.abs(rows).max(-1)  # NaN, if there is one
    count, unit = count_squares(np.where(np.isfinite(largest)[..., None], rows, np.float32(0)))
    with np.errstate(over="ignore"):
        mean = (np.ldexp(count.astype(np.float64), unit) / rows.shape[-1]).astype(np.float32)
    return np.where(np.isfinite(largest), mean, largest)


def rms_norm(x: Bits, dtype: str, norm: Norm, residual: Bits | None = None) -> tuple[Bits, Bits]:
    """Return the bits of the sums with the residual, and of the normalised rows.

    Args:
        x: Bits of the plain result, [rows, columns].
        dtype: "float32", "float16" or "bfloat16".
        norm: The norm.
        residual: Bits of that dtype, [rows, columns].
    """
    rows = np.asarray(add(x, residual, dtype))
    if rows.size == 0:
        return rows, rows.copy()
    values = np.asarray(decode(rows, dtype), np.float32)
    if norm.wide_sum and residual is not None:
        with np.errstate(all="ignore"):
            values = np.asarray(decode(x, dtype) + decode(residual, dtype), np.float32)
    one, factors = np.float32(1), norm.factors(x.shape[1])
    with np.errstate(all="ignore"):
        means = mean_of_squares(values)
        scales = one / np.sqrt(means + np.float32(norm.eps))
        normed = np.asarray(values * scales[:, None], np.float32)
        if norm.rounds_first:
            normed = rounded(normed, dtype)
        return rows, encode(np.asarray(normed * factors, np.float32), dtype)


def quantise(rows: Bits, dtype: str, to: str) -> tuple[Bits, Floats]:
    """Return the codes of normalised rows, as int8's or float8's bits, and each row's scale."""
    if rows.size == 0:
        return rows.astype(np.uint8), np.zeros(rows.shape[0], np.float32)
    values = np.asarray(decode(rows, dtype), np.float32)
    with np.errstate(all="ignore"):
        largest = np.abs(values).max(axis=1)  # NaN where the row has one
        scales = np.maximum(largest / np.float32(MOST[to]), np.float32(2.0**-126))
        scales = np.where(np.isfinite(largest), scales, np.float32(np.nan)).astype(np.float32)
        codes = np.asarray(values * (np.float32(1) / scales)[:, None], np.float32)
    if to in FLOATS:
        return encode(codes, to), scales
    return np.rint(np.nan_to_num(codes, nan=0.0)).astype(np.int8).view(np.uint8), scales
