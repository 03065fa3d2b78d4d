# SPDX-License-Identifier: Apache-2.0
"""The expected result of a reduction, bit for bit, in plain NumPy.

Decides the expected result of every dtype and operation: rank order, one rounding, one NaN per
dtype. Written from the definitions of the arithmetic and of the formats, never from the library's
source. It must not know how the library computes, nor import it.

Values travel as raw bits: an array of unsigned integers, two per element for complex dtypes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Bits = np.ndarray[Any, Any]

_PIECE = 1 << 14  # elements that are rounded at a time


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: sign, exponent, mantissa."""

    exponent_bits: int
    mantissa_bits: int
    canonical_nan: int
    # e4m3fn has no infinity: the top exponent holds numbers, and only magnitude 0x7f is NaN.
    has_infinity: bool = True

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def word(self) -> np.dtype[Any]:
        return np.dtype(f"u{self.width // 8}")

    @property
    def sign_bit(self) -> int:
        return 1 << (self.width - 1)

    @property
    def least_exponent(self) -> int:
        """Exponent of the smallest normal number, and of the subnormals."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def infinity(self) -> int:
        """Bits of +inf; where there is none, of the NaN that follows the largest number."""
        if self.has_infinity:
            return ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        return self.sign_bit - 1

    @property
    def overflow(self) -> int:
        """Bits of the result of an overflow."""
        return self.infinity if self.has_infinity else self.infinity - 1

    def is_nan(self, bits: Bits) -> Bits:
        magnitude = bits & self.word.type(self.sign_bit - 1)
        return magnitude > self.infinity if self.has_infinity else magnitude == self.infinity


FLOATS = {
    "float32": FloatFormat(8, 23, 0x7FC00000),
    "float64": FloatFormat(11, 52, 0x7FF8000000000000),
    "float16": FloatFormat(5, 10, 0x7E00),
    "bfloat16": FloatFormat(8, 7, 0x7FC0),
    "float8_e4m3fn": FloatFormat(4, 3, 0x7F, has_infinity=False),
    "float8_e5m2": FloatFormat(5, 2, 0x7F),
}
# Each component of a complex number is a number of its own.
COMPLEX = {"complex64": "float32", "complex128": "float64"}
INTEGERS = ("int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS, "bool", *COMPLEX)

FLOAT_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
BOOL_OPS = tuple(op for op in OPS if op != "AVG")


class Meaningless(Exception):
    """The operation has no meaning for the dtype."""


def ops_of(dtype: str) -> tuple[str, ...]:
    """Return the operations that have a meaning for a dtype."""
    if dtype in FLOATS:
        return FLOAT_OPS
    if dtype in COMPLEX:
        return ("SUM", "AVG")
    return BOOL_OPS if dtype == "bool" else OPS


def order_matters(dtype: str, op: str) -> bool:
    """Return whether another order of the ranks can give other bits."""
    return (dtype in FLOATS or dtype in COMPLEX) and op not in ("MIN", "MAX")


def lanes(dtype: str) -> int:
    """Return the number of words of bits per element."""
    return 2 if dtype in COMPLEX else 1


def word_of(dtype: str) -> np.dtype[Any]:
    """Return the unsigned integer type of an element's bits, or of its component's."""
    dtype = COMPLEX.get(dtype, dtype)
    if dtype in FLOATS:
        return FLOATS[dtype].word
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


def itemsize(dtype: str) -> int:
    return lanes(dtype) * word_of(dtype).itemsize


@cache
def _values(dtype: str) -> np.ndarray[Any, Any]:
    """Return the value of every bit pattern of a narrow format; float32 holds all of them."""
    form = FLOATS[dtype]
    bits = np.arange(1 << form.width, dtype=np.int64)
    mantissa = bits & ((1 << form.mantissa_bits) - 1)
    field = bits >> form.mantissa_bits & ((1 << form.exponent_bits) - 1)
    significand = np.where(field > 0, mantissa + (1 << form.mantissa_bits), mantissa)
    exponent = np.maximum(field, 1) - 1 + form.least_exponent - form.mantissa_bits
    value = np.ldexp(significand.astype(np.float64), exponent)
    magnitude = bits & (form.sign_bit - 1)
    if form.has_infinity:
        value[magnitude == form.infinity] = np.inf
    value[form.is_nan(bits.astype(form.word))] = np.nan
    return np.where(bits & form.sign_bit, -value, value).astype(np.float32)


def decode(bits: Bits, dtype: str) -> np.ndarray[Any, Any]:
    """Return the numbers in the format that adds them up: float64 for itself, else float32."""
    if dtype in ("float32", "float64"):
        return bits.view(np.dtype(dtype))
    return _values(dtype)[bits]


def encode(values: np.ndarray[Any, Any], dtype: str) -> Bits:
    """Round once, to nearest with ties to even; any NaN becomes the canonical one."""
    form = FLOATS[dtype]
    if dtype in ("float32", "float64"):
        bits = values.view(form.word).copy()
        bits[np.isnan(values)] = form.canonical_nan
        return bits
    # In pieces: the numbers on the way fit in the cache, which takes a third of the time.
    flat = values.reshape(-1)
    pieces = [flat[first : first + _PIECE] for first in range(0, max(flat.size, 1), _PIECE)]
    return np.concatenate([_round(piece, form) for piece in pieces]).reshape(values.shape)


def _round(values: np.ndarray[Any, Any], form: FloatFormat) -> Bits:
    # Exact in float64: scale by a power of two so that the last kept digit has weight 1.
    wide = np.abs(values.astype(np.float64))
    _, exponent = np.frexp(wide)  # wide = fraction * 2**exponent with fraction in [0.5, 1)
    exponent = np.maximum(exponent - 1, form.least_exponent)
    exponent[wide == 0] = form.least_exponent
    finite = np.isfinite(wide)
    significand = np.rint(
        np.ldexp(np.where(finite, wide, 0.0), form.mantissa_bits - exponent)
    ).astype(np.int64)
    # A normal number's leading digit adds the 1 that its exponent field lacks here.
    magnitude = ((exponent - form.least_exponent).astype(np.int64) << form.mantissa_bits) + (
        significand
    )
    magnitude[~finite | (magnitude > form.overflow)] = form.overflow
    bits = magnitude.astype(form.word)
    bits |= np.where(np.signbit(values), form.sign_bit, 0).astype(form.word)
    bits[np.isnan(values)] = form.canonical_nan
    return bits


def _extreme(arrays: Sequence[Bits], form: FloatFormat, op: str) -> Bits:
    """Return MIN or MAX: NaN wins over all, -0 is less than +0."""
    top, everything = form.word.type(form.sign_bit), form.word.type(2 * form.sign_bit - 1)

    def key(bits: Bits) -> Bits:  # unsigned integers in the order of the numbers
        return bits ^ np.where(bits & top, everything, top)

    pick = np.minimum if op == "MIN" else np.maximum
    best, nan = key(arrays[0]), form.is_nan(arrays[0])
    for bits in arrays[1:]:
        best = pick(best, key(bits))
        nan = nan | form.is_nan(bits)
    result = best ^ np.where(best & top, top, everything)
    result[nan] = form.canonical_nan
    return result


def _fold(arrays: Sequence[Any], step: Callable[..., Any]) -> Any:
    """Fold in the order of the ranks: ((a0 . a1) . a2) . ..."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        step(total, array, out=total)
    return total


def _reduce_floats(
    arrays: Sequence[Bits], dtype: str, op: str, world: int, nodes: Sequence[Sequence[int]]
) -> Bits:
    if op in ("MIN", "MAX"):
        return _extreme(arrays, FLOATS[dtype], op)
    numbers = [decode(bits, dtype) for bits in arrays]
    with np.errstate(all="ignore"):
        step = np.multiply if op == "PRODUCT" else np.add
        total = _fold([_fold([numbers[rank] for rank in ranks], step) for ranks in nodes], step)
        if op == "AVG":
            total = np.divide(total, total.dtype.type(world))
    return encode(total, dtype)


def _average(total: Bits, dtype: str, world: int) -> Bits:
    """Divide wrapped sums by the number of ranks; truncate towards zero."""
    wide = np.uint64 if dtype.startswith("u") else np.int64
    number = total.view(np.dtype(dtype)).astype(wide)
    return ((number - np.fmod(number, wide(world))) // wide(world)).astype(total.dtype)


def _reduce_integers(arrays: Sequence[Bits], dtype: str, op: str, world: int) -> Bits:
    if op in ("MIN", "MAX"):
        pick = np.minimum if op == "MIN" else np.maximum
        return _fold([bits.view(np.dtype(dtype)) for bits in arrays], pick).view(word_of(dtype))
    # Two's complement: sums and products of unsigned integers wrap to the same bits.
    steps = {
        "SUM": np.add,
        "AVG": np.add,
        "PRODUCT": np.multiply,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }
    total = _fold(arrays, steps[op])
    return _average(total, dtype, world) if op == "AVG" else total


def _reduce_bools(arrays: Sequence[Bits], op: str) -> Bits:
    if op == "BXOR":
        step = np.logical_xor
    else:
        step = np.logical_or if op in ("SUM", "MAX", "BOR") else np.logical_and
    return _fold([bits != 0 for bits in arrays], step).astype(np.uint8)


def reduce(
    arrays: Sequence[Bits],
    dtype: str,
    op: str,
    world: int,
    nodes: Sequence[Sequence[int]] | None = None,
) -> Bits:
    """Reduce one array of bits per rank.

    Args:
        arrays: Bits of rank 0, 1, ..., all of one length; never changed.
        dtype: One of DTYPES.
        op: One of OPS.
        world: Number of ranks.
        nodes: The ranks of each node: the order is ranks within a node, then nodes. None: one node.

    Returns:
        The bits that every rank must find, in an array of its own.

    Raises:
        Meaningless: The operation means nothing for the dtype.
    """
    if len(arrays) != world:
        raise ValueError(f"{len(arrays)} arrays for {world} ranks")
    if op not in ops_of(dtype):
        raise Meaningless(f"{op} of {dtype}")
    nodes = nodes or [range(world)]
    if dtype in COMPLEX:
        result = _reduce_floats(arrays, COMPLEX[dtype], op, world, nodes)
    elif dtype in FLOATS:
        result = _reduce_floats(arrays, dtype, op, world, nodes)
    elif dtype == "bool":
        result = _reduce_bools(arrays, op)
    else:
        result = _reduce_integers(arrays, dtype, op, world)
    return result
