# SPDX-License-Identifier: Apache-2.0
"""Elements and operations on them: the arithmetic of csrc/cpu/reduce_ops.inc, bit for bit.

Decides how an element widens to its accumulator, how accumulators combine and how one is rounded
back. Floating-point elements travel as the integers of their bits, since neither conversions nor
NaNs are the same on all machines. Loads and stores are not in this file.

A format is a constexpr string, the name of a torch dtype (a key of call.WORDS). Kernels must
be launched with enable_fp_fusion=False: nothing here may become a fused multiply-add.

Conversions to half types and the bits of a NaN differ between the interpreter and the
architectures, and some don't know fp8. Integer arithmetic has the CPU's bits on all of them, and
these kernels wait for memory anyway.
"""

import triton
import triton.language as tl

FLOAT_ABS = tl.constexpr(0x7FFFFFFF)
FLOAT_INF = tl.constexpr(0x7F800000)
FLOAT_NAN = tl.constexpr(0x7FC00000)
DOUBLE_ABS = tl.constexpr(0x7FFFFFFFFFFFFFFF)
DOUBLE_INF = tl.constexpr(0x7FF0000000000000)
DOUBLE_NAN = tl.constexpr(0x7FF8000000000000)


@triton.jit
def is_float(FORMAT: tl.constexpr):
    """Whether elements are floating-point numbers."""
    return (
        (FORMAT == "float32")
        | (FORMAT == "float64")
        | (FORMAT == "float16")
        | (FORMAT == "bfloat16")
        | (FORMAT == "float8_e4m3fn")
        | (FORMAT == "float8_e5m2")
    )


@triton.jit
def _widen_fp8(word, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    bias: tl.constexpr = (1 << (EXPONENT_BITS - 1)) - 1
    code = word.to(tl.int32)
    magnitude = code & 0x7F
    shifted = magnitude << (23 - MANTISSA_BITS)
    # Subnormals: read as 1.m * 2^e with the least exponent, then take the 1 away again.
    least = tl.full((), (128 - bias) << 23, tl.int32)
    subnormal = (shifted + least).to(tl.float32, bitcast=True) - least.to(tl.float32, bitcast=True)
    bits = tl.where(
        shifted < (1 << 23),
        subnormal.to(tl.int32, bitcast=True),
        shifted + ((127 - bias) << 23),
    )
    if EXPONENT_BITS == 5:
        bits = tl.where(magnitude >= 0x7C, shifted | FLOAT_INF, bits)
    else:
        bits = tl.where(magnitude >= 0x7F, FLOAT_NAN, bits)
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def widen(word, FORMAT: tl.constexpr):
    """An element as it lies in memory -> its accumulator, exactly."""
    if FORMAT == "float32":
        return word.to(tl.float32, bitcast=True)
    elif FORMAT == "float64":
        return word.to(tl.float64, bitcast=True)
    elif FORMAT == "float16":
        return word.to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT == "bfloat16":
        return (word.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif FORMAT == "float8_e4m3fn":
        return _widen_fp8(word, 4, 3)
    elif FORMAT == "float8_e5m2":
        return _widen_fp8(word, 5, 2)
    elif FORMAT == "bool":
        return (word != 0).to(tl.uint8)
    else:
        return word


@triton.jit
def _narrow_fp8(value, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    bias: tl.constexpr = (1 << (EXPONENT_BITS - 1)) - 1
    shift: tl.constexpr = 23 - MANTISSA_BITS
    # Overflow: e4m3fn has no infinity and saturates to its largest number.
    largest: tl.constexpr = 0x7C if EXPONENT_BITS == 5 else 0x7E
    # A power of two whose fp32 neighbour is one subnormal step away: adding it rounds to that step.
    magic = tl.full((), (128 - bias - MANTISSA_BITS + 23) << 23, tl.int32)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & FLOAT_ABS
    odd = (magnitude >> shift) & 1
    # Taking the bias off first keeps the sum in range even for a NaN's bits.
    normal = (magnitude - ((127 - bias) << 23) + ((1 << (shift - 1)) - 1) + odd) >> shift
    stepped = magnitude.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    subnormal = stepped.to(tl.int32, bitcast=True) - magic
    code = tl.where(magnitude < ((128 - bias) << 23), subnormal, normal)
    code = tl.where(code > largest, largest, code) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > FLOAT_INF, 0x7F, code).to(tl.uint8)


@triton.jit
def narrow(value, FORMAT: tl.constexpr):
    """An accumulator -> the element, rounded to nearest even; any NaN becomes the canonical one."""
    if FORMAT == "float32":
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        return tl.where((bits & FLOAT_ABS) > FLOAT_INF, FLOAT_NAN, bits)
    elif FORMAT == "float64":
        bits = value.to(tl.float64).to(tl.int64, bitcast=True)
        return tl.where((bits & DOUBLE_ABS) > DOUBLE_INF, DOUBLE_NAN, bits)
    elif FORMAT == "float16":
        value = value.to(tl.float32)
        word = value.to(tl.float16).to(tl.int16, bitcast=True)
        return tl.where(value != value, tl.full((), 0x7E00, tl.int16), word)
    elif FORMAT == "bfloat16":
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        odd = (bits >> 16) & 1
        # The sum wraps for NaNs only.
        word = (bits + 0x7FFF + odd) >> 16
        return tl.where((bits & FLOAT_ABS) > FLOAT_INF, 0x7FC0, word).to(tl.int16)
    elif FORMAT == "float8_e4m3fn":
        return _narrow_fp8(value.to(tl.float32), 4, 3)
    elif FORMAT == "float8_e5m2":
        return _narrow_fp8(value.to(tl.float32), 5, 2)
    else:
        return value


@triton.jit
def round_to(value, DTYPE: tl.constexpr):
    """An accumulator -> a value of fp32, fp16 or bf16 as narrow() rounds it: for epilogues."""
    if DTYPE == tl.float16:
        return narrow(value, "float16").to(tl.float16, bitcast=True)
    elif DTYPE == tl.bfloat16:
        return narrow(value, "bfloat16").to(tl.bfloat16, bitcast=True)
    else:
        tl.static_assert(DTYPE == tl.float32)
        return narrow(value, "float32").to(tl.float32, bitcast=True)


@triton.jit
def _extremum(a, b, OP: tl.constexpr):
    """MIN or MAX: a NaN wins over all, -0 is less than +0."""
    if OP == "MAX":
        ahead = a > b
    else:
        ahead = a < b
    if not a.dtype.is_floating():
        return tl.where(ahead, a, b)
    integer = tl.int64 if a.dtype == tl.float64 else tl.int32
    a_bits = a.to(integer, bitcast=True)
    b_bits = b.to(integer, bitcast=True)
    # Equal floats have equal bits, but for the two zeros: and makes +0 of them, or makes -0.
    if OP == "MAX":
        either = a_bits & b_bits
    else:
        either = a_bits | b_bits
    # When only b is NaN both comparisons are false, and b is taken.
    winner = tl.where(ahead | (a != a), a_bits, b_bits)
    return tl.where(a == b, either, winner).to(a.dtype, bitcast=True)


@triton.jit
def combine(a, b, OP: tl.constexpr):
    """One step of a reduction, on accumulators; a comes first in the order of ranks."""
    if (OP == "SUM") | (OP == "AVG"):
        return a + b
    elif OP == "PRODUCT":
        return a * b
    elif OP == "BAND":
        return a & b
    elif OP == "BOR":
        return a | b
    elif OP == "BXOR":
        return a ^ b
    else:
        return _extremum(a, b, OP)


@triton.jit
def divide(a, b):
    """A true division, rounded to nearest, of integers truncated: never by a reciprocal."""
    if not a.dtype.is_floating():
        return (a // b).to(a.dtype)
    elif a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def finish(total, OP: tl.constexpr, FORMAT: tl.constexpr, WORLD: tl.constexpr):
    """The accumulator of all ranks -> the element of the result."""
    if OP == "AVG":
        if total.dtype.primitive_bitwidth >= 32:
            total = divide(total, tl.full((), WORLD, total.dtype))
        elif total.dtype.is_int_signed():  # small integers don't hold every number of ranks
            total = divide(total, tl.full((), WORLD, tl.int32))
        else:
            total = divide(total, tl.full((), WORLD, tl.uint32))
    return narrow(total, FORMAT)
