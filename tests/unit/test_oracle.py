# SPDX-License-Identifier: Apache-2.0
"""The oracle's formats and roundings against an independent source, which is torch.

Decides nothing about the library: the library is never imported here. Its results are held against
the oracle's in contract/test_values.py, and against another reference in C++ by
protocol/native/test_reduce.cpp. So a mistake of one of the three shows there.
"""

import numpy as np
import pytest
import torch

from tests.support import oracle

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def bits(dtype: str, *values: int) -> np.ndarray:
    return np.array(values, oracle.word_of(dtype))


def reduce_words(dtype: str, op: str, *words: int) -> list[int]:
    """One word per rank; the result as a list of words."""
    columns = [bits(dtype, word) for word in words]
    return oracle.reduce(columns, dtype, op, len(words)).tolist()


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
