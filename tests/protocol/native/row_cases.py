# SPDX-License-Identifier: Apache-2.0
"""Cases of rows with their results by the oracle, as the bytes that test_rows.cpp reads.

Decides the shapes and values that the kernels meet: spreads of magnitudes, subnormals, zeros, the
largest numbers, a NaN and an infinity.
"""

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.support import row_oracle
from tests.support.oracle import FLOATS, Bits, decode, encode
from tests.support.row_oracle import Norm

ROW_DTYPES = ("float32", "float16", "bfloat16")
CODE_DTYPES = ("int8", "float8_e4m3fn")
# As csrc/dtypes.h has them.
CODES = {"float32": 0, "float16": 2, "bfloat16": 3, "float8_e4m3fn": 4, "int8": 6}
# Around the widths of vectors, pairs and pieces; the last has many pieces and an odd end.
COLUMNS = (1, 2, 3, 8, 31, 64, 100, 511, 513, 1000, 4096, 70_001)
VALUES = ("normal", "spread", "subnormal", "zeros", "largest", "nan", "infinity")


@dataclass(frozen=True)
class RowCase:
    """Rows, and how they are normalised."""

    dtype: str
    shape: tuple[int, int]
    norm: Norm
    plain: Bits
    residual: Bits | None
    out_dtype: str

    def encoded(self) -> bytes:
        """Return the case and its results as bytes."""
        summed, out = row_oracle.rms_norm(self.plain, self.dtype, self.norm, self.residual)
        scales = b""
        if self.out_dtype in CODE_DTYPES:
            out, found = row_oracle.quantise(out, self.dtype, self.out_dtype)
            scales = found.tobytes()
        norm = self.norm
        head = struct.pack(
            "9I2f",
            CODES[self.dtype],
            CODES[norm.weight_dtype],
            CODES[self.out_dtype],
            self.residual is not None,
            norm.weight is not None,
            norm.rounds_first,
            norm.wide_sum,
            *self.shape,
            norm.eps,
            norm.offset,
        )
        given = [
            one.tobytes() for one in (self.plain, self.residual, norm.weight) if one is not None
        ]
        return b"".join([head, *given, summed.tobytes(), out.tobytes(), scales])


def values(kind: str, dtype: str, shape: tuple[int, int], random: np.random.Generator) -> Bits:
    """Return bits of a kind of values; every third row of the last kinds has a special one."""
    form = FLOATS[dtype]
    numbers = random.standard_normal(shape)
    if kind == "spread":
        most = 13 if dtype == "float16" else 60
        numbers = np.ldexp(numbers, random.integers(-most, most, shape))
    if kind == "subnormal":
        numbers = np.ldexp(numbers, form.least_exponent - 3)
    if kind == "zeros":
        numbers *= 0  # of both signs
    bits = encode(np.clip(numbers, -3e38, 3e38).astype(np.float32), dtype)
    special = {
        "largest": form.infinity - 1,
        "nan": form.canonical_nan + 1,
        "infinity": form.infinity,
    }
    if kind in special and bits.size:
        bits[::3, random.integers(shape[1])] = special[kind] | random.integers(2) * form.sign_bit
    return bits


def canonical(bits: Bits, dtype: str) -> Bits:
    """Return bits as a plain call leaves them: with one NaN."""
    return encode(np.asarray(decode(bits, dtype), np.float32), dtype)


def cases() -> Iterator[RowCase]:
    """Yield cases: every dtype meets every number of columns, kind of values and option."""
    random = np.random.default_rng(31)
    kinds = itertools.cycle(VALUES)
    flags = ((False, False), (True, False), (False, True), (True, True))  # rounds_first, wide_sum
    options = itertools.cycle(itertools.product((0.0, 1.0, 0.1), flags, (1e-6, 1e-5, 0.0)))
    for dtype in ROW_DTYPES:
        outs = (dtype, dtype, *CODE_DTYPES)
        weights = (None, dtype, *ROW_DTYPES)
        for columns in COLUMNS:
            rows = (1, 2, 7, 0) if columns < 5000 else (1, 1, 1, 1)
            for num_rows, weight, has_residual, out in itertools.product(
                rows, weights, (True, False), outs
            ):
                if columns > 5000 and random.integers(12):
                    continue
                offset, (rounds_first, wide_sum), eps = next(options)
                shape, kind = (num_rows, columns), next(kinds)
                factors = values("normal", weight or "float32", (1, columns), random)[0]
                given = factors if weight else None
                norm = Norm(eps, offset, rounds_first, wide_sum, given, weight or "float32")
                plain = canonical(values(kind, dtype, shape, random), dtype)
                residual = values(kind, dtype, shape, random) if has_residual else None
                yield RowCase(dtype, shape, norm, plain, residual, out)


def write_cases(path: str) -> int:
    """Write all cases into a file; return how many."""
    count = 0
    with open(path, "wb") as file:
        for case in cases():
            file.write(case.encoded())
            count += 1
    return count
