# SPDX-License-Identifier: Apache-2.0
"""The oracle of rows against fractions, and against torch's own norm.

Decides nothing about the library: the library is never imported here.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support import row_oracle
from tests.support.oracle import decode, encode
from tests.support.row_oracle import Norm

SPREADS = (0, 1, 8, 30, 60, 140)  # of binary exponents, in both directions
SIZES = (1, 2, 3, 5, 64, 1000)


def a_row(columns: int, spread: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    exponents = random.integers(-spread, min(spread, 126) + 1, columns)
    row = np.ldexp(random.standard_normal(columns), exponents)
    return np.clip(row, -3e38, 3e38).astype(np.float32)


def nearest(value: Fraction) -> int:
    """Return the nearest integer, of two the even one."""
    return round(value)  # Python's rounding of fractions is exact


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("columns", SIZES)
def test_a_sum_of_squares_is_a_sum_of_fractions(columns: int, spread: int) -> None:
    row = a_row(columns, spread, columns + spread)
    squares = [Fraction(float(one)) ** 2 for one in row]
    top = np.frexp(np.abs(row).max())[1]  # all are below 2**top
    log_columns = max(2, next(k for k in range(64) if 1 << k >= columns))
    unit = Fraction(2) ** (2 * int(top) + log_columns - 53)
    count, exponent = map(int, row_oracle.count_squares(row))
    assert Fraction(2) ** exponent == unit
    assert count == sum(nearest(one / unit) for one in squares)
    assert count <= 2**53, "fp64 would not hold every sum"
    # Within the bound that docs/numerics.md gives.
    assert abs(count * unit - sum(squares)) <= columns * unit / 2
    mean = row_oracle.mean_of_squares(row)
    with np.errstate(over="ignore"):
        expected = np.float32(float(count * unit) / columns)
    assert mean.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([0.0, -0.0], 0.0),
        ([2.0**-149, 0.0], 0.0),  # the square of a subnormal is far below float32
        ([3.0, 4.0], 12.5),
        ([1.0, -np.inf], np.inf),
        ([np.inf, np.nan], np.nan),
        ([3.4e38, 1.0], np.inf),
    ],
)
def test_a_mean_by_hand(values: list[float], mean: float) -> None:
    with np.errstate(over="ignore"):
        found = row_oracle.mean_of_squares(np.array(values, np.float32))
    assert found == mean or (np.isnan(found) and np.isnan(mean))


def test_what_is_rounded_before_the_next_step() -> None:
    # 256 + 0.75 in bfloat16 is 256: the sum is rounded before the norm sees it.
    x = encode(np.array([[256.0, 0.0]], np.float32), "bfloat16")
    residual = encode(np.array([[0.75, 0.0]], np.float32), "bfloat16")
    summed, out = row_oracle.rms_norm(x, "bfloat16", Norm(eps=0.0), residual)
    assert decode(summed, "bfloat16").tolist() == [[256.0, 0.0]]
    assert decode(out, "bfloat16")[0, 0] == decode(
        encode(np.float32([2**0.5]), "bfloat16"), "bfloat16"
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_norm_is_within_an_ulp_of_torchs(dtype: str) -> None:
    kind = getattr(torch, dtype)
    word = torch.int32 if dtype == "float32" else torch.int16
    torch.manual_seed(7)
    x, weight = torch.randn(64, 1000).to(kind), torch.randn(1000).to(kind)
    theirs = torch.nn.functional.rms_norm(x, (1000,), weight, 1e-6)
    unsigned = np.uint32 if dtype == "float32" else np.uint16
    bits = [one.view(word).numpy().view(unsigned) for one in (x, weight)]
    _, ours = row_oracle.rms_norm(bits[0], dtype, Norm(1e-6, weight=bits[1], weight_dtype=dtype))
    found = torch.from_numpy(ours.view(f"i{ours.itemsize}").copy()).view(kind)
    if dtype == "float32":
        assert ((found - theirs).abs() <= 5e-7 * theirs.abs()).all()
    else:
        steps = (found.view(word).int() - theirs.view(word).int()).abs()
        assert steps.max() <= 1
        assert (steps > 0).float().mean() < 1e-3


def test_a_quantised_row() -> None:
    rows = encode(np.array([[127.0, -63.5, 0.5], [0.0, 0.0, -0.0]], np.float32), "float32")
    codes, scales = row_oracle.quantise(rows, "float32", "int8")
    assert codes.view(np.int8).tolist() == [[127, -64, 0], [0, 0, 0]]
    assert scales.tolist() == [1.0, 2.0**-126]
    rows[0, 1] = encode(np.float32([np.inf]), "float32")[0]
    codes, scales = row_oracle.quantise(rows, "float32", "float8_e4m3fn")
    assert np.isnan(scales[0])
    assert (codes[0] & 0x7F).tolist() == [0x7F] * 3
