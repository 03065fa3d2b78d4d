# SPDX-License-Identifier: Apache-2.0
"""The expected result of a reduction whose elements are coded between nodes, in plain NumPy.

Decides the bits of every wire format: blocks, scales, roundings, and the order of sums. Written
from the definition in docs/numerics.md, never from the library's source, which it must not import.

Q codes an array of fp32, and D decodes it. Blocks of 128 elements are counted from the message's
element 0. A message is the tensor of an all_reduce, or one rank's part of a reduce_scatter.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support import oracle

Floats = np.ndarray[Any, np.dtype[np.float32]]

BLOCK = 128
WIRES = ("int8", "fp8", "bf16")
# The largest magnitude of a code; bf16 has no scale.
LARGEST = {"int8": np.float32(127), "fp8": np.float32(448)}
LEAST_SCALE = np.float32(2.0**-126)


def through_wire(values: Floats, wire: str) -> Floats:
    """Return D(Q(values)): the elements of one message behind a hop."""
    assert values.dtype == np.float32
    assert values.ndim == 1
    if wire == "bf16":
        return oracle.decode(oracle.encode(values, "bfloat16"), "bfloat16")
    padded = np.zeros(-(-len(values) // BLOCK) * BLOCK, np.float32)
    padded[: len(values)] = values
    return _blocks(padded.reshape(-1, BLOCK), wire).reshape(-1)[: len(values)]


def _blocks(values: Floats, wire: str) -> Floats:
    """Return D(Q(values)) of blocks, one a row. The zeros that fill the last one change nothing."""
    largest = np.abs(values).max(axis=1, keepdims=True, initial=0)  # NaN, if there is one
    with np.errstate(all="ignore"):
        scale = np.maximum(largest / LARGEST[wire], LEAST_SCALE)
        quotients = values * (np.float32(1) / scale)
        if wire == "int8":
            codes = np.rint(quotients).clip(-127, 127).astype(np.int8).astype(np.float32)
        else:
            codes = oracle.decode(oracle.encode(quotients, "float8_e4m3fn"), "float8_e4m3fn")
        result: Floats = np.where(np.isfinite(largest), codes * scale, np.float32(np.nan))
    return result


def with_feedback(values: Floats, error: Floats, wire: str) -> tuple[Floats, Floats]:
    """Return D(Q(values + error)), and the new error; an error that is not finite is dropped."""
    with np.errstate(all="ignore"):
        wanted = values + error
        given = through_wire(wanted, wire)
        left = wanted - given
    return given, np.where(np.isfinite(left), left, np.float32(0))


def partials(
    arrays: Sequence[oracle.Bits],
    dtype: str,
    op: str,
    nodes: Sequence[Sequence[int]],
) -> list[Floats]:
    """Return each node's exact sum in fp32, in the order of its ranks; AVG divides it."""
    numbers = [oracle.decode(bits, dtype) for bits in arrays]
    sums = []
    for ranks in nodes:
        total = numbers[ranks[0]].copy()
        for rank in ranks[1:]:
            total = total + numbers[rank]
        sums.append(total / np.float32(len(arrays)) if op == "AVG" else total)
    return sums


def add(rows: Sequence[Floats]) -> Floats:
    """Add in fp32, in the order of the nodes."""
    total = rows[0].copy()
    for row in rows[1:]:
        total = total + row
    return total


def all_reduce(
    arrays: Sequence[oracle.Bits],
    dtype: str,
    op: str,
    nodes: Sequence[Sequence[int]],
    wire: str,
) -> oracle.Bits:
    """Return the bits that every rank must find; see `oracle.reduce`."""
    with np.errstate(all="ignore"):
        rows = [through_wire(one, wire) for one in partials(arrays, dtype, op, nodes)]
        return oracle.encode(through_wire(add(rows), wire), dtype)


def reduce_scatter(
    arrays: Sequence[oracle.Bits],
    dtype: str,
    op: str,
    nodes: Sequence[Sequence[int]],
    wire: str,
) -> list[oracle.Bits]:
    """Return the bits of each rank's part: each is a message, and its sum is not coded."""
    parts = [bits.reshape(len(arrays), -1) for bits in arrays]
    results = []
    with np.errstate(all="ignore"):
        for rank in range(len(arrays)):
            mine = partials([one[rank] for one in parts], dtype, op, nodes)
            results.append(oracle.encode(add([through_wire(one, wire) for one in mine]), dtype))
    return results
