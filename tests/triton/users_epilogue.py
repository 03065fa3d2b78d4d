# SPDX-License-Identifier: Apache-2.0
"""An epilogue as a user writes one: imported where kernels run or are compiled."""

import triton
import triton.language as tl


@triton.jit
def square_plus(value, index, mask, row, args):
    """value * value + addend; the row that an element lies in goes into an array of its own."""
    addend, rows = args
    tl.store(rows + index, tl.zeros_like(index) + row, mask=mask)
    return value * value + tl.load(addend + index, mask=mask, other=0.0)


@triton.jit
def below_largest(value, index, mask, row, args):
    """How far each element lies below the largest one of its row, times a number."""
    return (tl.max(tl.where(mask, value, float("-inf")), axis=0) - value) * args[0]


@triton.jit
def times(value, index, mask, row, args):
    """value * args[0], which keeps integers."""
    return value * args[0]


@triton.jit
def plus_first(value, index, mask, row, args):
    """Add the first element of an array."""
    return value + tl.load(args[0])


@triton.jit
def of_four(value, index, mask, args):
    """No epilogue: it has no row."""
    return value
