# SPDX-License-Identifier: Apache-2.0
"""The oracle against results worked out by hand, and its roundings against an independent source.

Decides nothing about the library: the library is never imported here.
"""

import time

import numpy as np
import pytest
import torch

from tests.support import oracle

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def f64(*values: float) -> np.ndarray:
    return np.array(values, np.float64).view(np.uint64)


def bits(dtype: str, *values: int) -> np.ndarray:
    return np.array(values, oracle.word_of(dtype))


def reduce_columns(dtype: str, op: str, *columns: np.ndarray) -> list[int]:
    """One array per rank; the result as a list of words."""
    return oracle.reduce(columns, dtype, op, len(columns)).tolist()


def reduce_words(dtype: str, op: str, *words: int) -> list[int]:
    """One word per rank."""
    return reduce_columns(dtype, op, *(bits(dtype, word) for word in words))


def test_the_order_of_the_ranks_is_the_order_of_the_sum() -> None:
    big, one = f32(2.0**24), f32(1.0)
    # 2^24 + 1 ties to even and gives 2^24 again; 1 is lost or kept depending on when it comes.
    assert reduce_columns("float32", "SUM", big, one, f32(-(2.0**24))) == f32(0.0).tolist()
    assert reduce_columns("float32", "SUM", big, f32(-(2.0**24)), one) == f32(1.0).tolist()
    assert reduce_columns("float32", "SUM", one, big, f32(-(2.0**24))) == f32(0.0).tolist()
    assert reduce_columns("float32", "SUM", big, one, one) == f32(2.0**24).tolist()
    assert reduce_columns("float32", "SUM", one, one, big) == f32(2.0**24 + 2).tolist()


def test_narrow_formats_round_once_not_at_every_step() -> None:
    # float16: 2048 + 1 + 1 = 2050 exactly in float32; rounding at each step would stay at 2048.
    half = {2048: 0x6800, 2050: 0x6801, 1: 0x3C00}
    words = [half[value] for value in (2048, 1, 1)]
    assert reduce_words("float16", "SUM", *words) == [half[2050]]
    # bfloat16: 256 + 1 + 1 = 258 = 0x4381.
    assert reduce_words("bfloat16", "SUM", 0x4380, 0x3F80, 0x3F80) == [0x4381]


def test_overflow() -> None:
    """Where torch, to which the roundings are compared below, does otherwise or says nothing."""
    assert reduce_words("float8_e4m3fn", "SUM", 0x7E, 0x7E) == [0x7E]  # 448 + 448 saturates
    assert reduce_words("float8_e4m3fn", "SUM", 0xFE, 0xFE) == [0xFE]
    # An infinite accumulator saturates too: 448 to the 16th exceeds float32.
    assert reduce_words("float8_e4m3fn", "PRODUCT", *[0x7E] * 16) == [0x7E]
    # The largest value that still rounds down: 65504 + 15 < 65520 <= 65504 + 16.
    largest, fifteen, sixteen = 0x7BFF, 0x4B80, 0x4C00
    assert reduce_words("float16", "SUM", largest, fifteen) == [0x7BFF]
    assert reduce_words("float16", "SUM", largest, sixteen) == [0x7C00]


def test_subnormals_are_kept() -> None:
    for dtype in oracle.FLOATS:
        assert reduce_words(dtype, "SUM", 1, 1) == [2]
        assert reduce_words(dtype, "MIN", 1, 1) == [1]
    assert reduce_words("float32", "AVG", 1, 2) == [2]  # 1.5 units tie to even
    # The sum of subnormals may be the least normal number.
    assert reduce_words("float16", "SUM", 0x3FF, 1) == [0x400]


def test_zeros_keep_their_sign() -> None:
    for dtype, form in oracle.FLOATS.items():
        plus, minus = 0, form.sign_bit
        assert reduce_words(dtype, "SUM", minus, minus) == [minus]
        assert reduce_words(dtype, "SUM", minus, plus) == [plus]
        assert reduce_words(dtype, "SUM", minus) == [minus]  # not 0 + -0
        for pair in ((plus, minus), (minus, plus)):
            assert reduce_words(dtype, "MIN", *pair) == [minus]
            assert reduce_words(dtype, "MAX", *pair) == [plus]


def test_every_nan_becomes_the_canonical_one() -> None:
    for dtype, form in oracle.FLOATS.items():
        number = 1
        sources = [form.infinity + 1, form.sign_bit + form.infinity + 1]
        if not form.has_infinity:
            sources = [0x7F, 0xFF]
        for nan in sources:
            for op in oracle.FLOAT_OPS:
                assert reduce_words(dtype, op, nan) == [form.canonical_nan]
                assert reduce_words(dtype, op, nan, number) == [form.canonical_nan]
                assert reduce_words(dtype, op, number, nan) == [form.canonical_nan]
        if form.has_infinity:
            infinite, negative = form.infinity, form.infinity | form.sign_bit
            assert reduce_words(dtype, "SUM", infinite, negative) == [form.canonical_nan]
            assert reduce_words(dtype, "MIN", infinite, negative) == [negative]


def test_avg_divides_and_never_multiplies_by_a_reciprocal() -> None:
    total = np.float32(5.0)
    assert np.float32(total / np.float32(3)) != total * np.float32(1 / 3)  # a telling total
    columns = [f32(1.0), f32(3.0), f32(1.0)]
    assert reduce_columns("float32", "AVG", *columns) == f32(np.float32(5) / np.float32(3)).tolist()
    assert reduce_columns("float64", "AVG", f64(1.0), f64(0.0), f64(0.0)) == f64(1 / 3).tolist()
    # Divided before it is rounded: the sum 65504 + 65504 is no float16, its half is.
    assert reduce_words("float16", "AVG", 0x7BFF, 0x7BFF) == [0x7BFF]
    assert reduce_words("float8_e4m3fn", "AVG", 0x7E, 0x7E) == [0x7E]


def test_avg_of_integers_is_the_wrapped_sum_truncated_towards_zero() -> None:
    assert reduce_words("int64", "AVG", 7, 0) == [3]
    assert reduce_words("int64", "AVG", 2**64 - 7, 0) == [2**64 - 3]  # -7 / 2
    assert reduce_words("int8", "AVG", 100, 100) == [256 - 28]  # 200 wraps to -56
    assert reduce_words("int8", "AVG", *[1] * 200) == [0]  # -56 / 200, and 200 is no int8
    assert reduce_words("uint8", "AVG", 200, 100) == [22]
    assert reduce_words("uint64", "AVG", 2**63, 2**62) == [3 * 2**61]


def test_integers_wrap() -> None:
    assert reduce_words("int8", "SUM", 0x7F, 1) == [0x80]
    assert reduce_words("uint8", "PRODUCT", 200, 2) == [144]
    assert reduce_words("int64", "SUM", 2**63, 2**63) == [0]
    assert reduce_words("int32", "PRODUCT", 2**32 - 3, 5) == [2**32 - 15]  # -3 * 5


def test_integers_compare_by_their_sign() -> None:
    for name in oracle.INTEGERS:
        high, low = 1 << (np.dtype(name).itemsize * 8 - 1), 1
        signed = name.startswith("i")
        assert reduce_words(name, "MAX", high, low) == [low if signed else high]
        assert reduce_words(name, "MIN", high, low) == [high if signed else low]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("SUM", [0, 1, 1, 1]),
        ("MAX", [0, 1, 1, 1]),
        ("BOR", [0, 1, 1, 1]),
        ("PRODUCT", [0, 0, 0, 1]),
        ("MIN", [0, 0, 0, 1]),
        ("BAND", [0, 0, 0, 1]),
        ("BXOR", [0, 1, 1, 0]),
    ],
)
def test_bool_and_bits(op: str, expected: list[int]) -> None:
    columns = bits("bool", 0, 0, 1, 1), bits("bool", 0, 1, 0, 1)
    assert reduce_columns("bool", op, *columns) == expected
    if op.startswith("B"):
        assert reduce_columns("uint16", op, *columns) == expected


def test_complex_is_reduced_by_component() -> None:
    columns = f32(1.0, 2.0**24), f32(2.0, 1.0), f32(4.0, -(2.0**24))
    assert reduce_columns("complex64", "SUM", *columns) == f32(7.0, 0.0).tolist()
    result = reduce_columns("complex128", "AVG", f64(1.0, float("nan")), f64(0.0, 1.0))
    assert result == [f64(0.5)[0], 0x7FF8000000000000]


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_what_means_nothing_is_refused(dtype: str) -> None:
    one = np.zeros(oracle.lanes(dtype), oracle.word_of(dtype))
    for op in oracle.OPS:
        if op not in oracle.ops_of(dtype):
            with pytest.raises(oracle.Meaningless, match=f"{op} of {dtype}"):
                oracle.reduce([one], dtype, op, 1)
        else:
            assert oracle.reduce([one], dtype, op, 1).tolist() == one.tolist()


@pytest.mark.parametrize("dtype", NARROW)
def test_decoding_agrees_with_torch(dtype: str) -> None:
    form = oracle.FLOATS[dtype]
    every = np.arange(1 << form.width).astype(form.word)
    theirs = torch.from_numpy(every).view(getattr(torch, dtype)).float().numpy()
    ours = oracle.decode(every, dtype)
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    known = ~np.isnan(ours)
    assert np.array_equal(ours.view(np.uint32)[known], theirs.view(np.uint32)[known])
    assert np.array_equal(oracle.encode(ours, dtype)[known], every[known])


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_agrees_with_torch(dtype: str) -> None:
    form = oracle.FLOATS[dtype]
    rng = np.random.default_rng(7)
    values = np.concatenate(
        [
            rng.integers(0, 2**32, 200_000, np.uint32).view(np.float32),
            (rng.standard_normal(200_000) * 2.0 ** rng.integers(-30, 20, 200_000)).astype("f4"),
        ]
    )
    finite = np.sort(oracle.decode(np.arange(form.overflow, dtype=form.word), dtype))
    ties = (finite[1:].astype(np.float64) + finite[:-1]) / 2
    values = np.concatenate([values, ties.astype(np.float32), -ties.astype(np.float32)])
    if not form.has_infinity:  # torch makes a NaN of what is too large
        values = values[~(np.abs(values) > oracle.decode(bits(dtype, form.overflow), dtype)[0])]
    values = values[~np.isnan(values)]
    theirs = torch.from_numpy(values).to(getattr(torch, dtype))
    integers = {1: torch.uint8, 2: torch.uint16}[form.word.itemsize]
    assert np.array_equal(oracle.encode(values, dtype), theirs.view(integers).numpy())


def test_inputs_are_never_changed_or_returned() -> None:
    for dtype in oracle.DTYPES:
        for op in oracle.ops_of(dtype):
            first = np.ones(2 * oracle.lanes(dtype), oracle.word_of(dtype))
            kept = first.copy()
            result = oracle.reduce([first], dtype, op, 1)
            result[:] = 0
            assert np.array_equal(first, kept)


@pytest.mark.slow
def test_large_inputs_take_seconds_not_minutes() -> None:
    start = time.monotonic()
    column = np.ones(1 << 22, np.float32).view(np.uint32)
    result = oracle.reduce([column] * 4, "float32", "SUM", 4)
    narrow = oracle.reduce([column.view(np.uint16)] * 2, "bfloat16", "SUM", 2)
    assert result[-1] == f32(4.0)[0]
    assert narrow.size == 1 << 23
    assert time.monotonic() - start < 60
