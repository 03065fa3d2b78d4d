# SPDX-License-Identifier: Apache-2.0
"""Coded sums between nodes are within the bound of docs/numerics.md, by the oracle alone.

The library has the oracle's bits (tests/nodes/test_wire.py), so its results have the same bound.
A bound of which nothing comes near would say little: most of it must be seen.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.wire_oracle import (
    BLOCK,
    LARGEST,
    WIRES,
    Floats,
    add,
    through_wire,
    with_feedback,
)

NUM_BLOCKS = 10_000


def random_blocks(num_nodes: int) -> Iterator[list[Floats]]:
    """Yield what each node has of many blocks, as one array each."""
    rng = np.random.default_rng(num_nodes)
    spread = np.exp2(rng.integers(-60, 60, (NUM_BLOCKS, 1)))
    yield [(rng.standard_normal((NUM_BLOCKS, BLOCK)) * spread) for _ in range(num_nodes)]
    alike = rng.uniform(-1, 1, (NUM_BLOCKS // 10, BLOCK))  # the nodes' errors add up
    yield [alike] * num_nodes


def special_blocks(num_nodes: int) -> Iterator[list[Floats]]:
    rng = np.random.default_rng(7)
    one_hot, constant = np.zeros((1, BLOCK)), np.full((1, BLOCK), 0.3)
    one_hot[0, 5] = 3.7
    alternating = constant * np.where(np.arange(BLOCK) % 2, 1, -1)
    for one in (one_hot, constant, alternating, np.zeros((1, BLOCK))):
        yield [one] * num_nodes
    yield [one_hot, *[constant] * (num_nodes - 1)]
    for size in (2.0**-149, 2.0**-126, 2.0**-120, 2.0**127 / num_nodes):
        yield [rng.uniform(-size, size, (100, BLOCK)) for _ in range(num_nodes)]


def point(values: Floats, wire: str) -> Floats:
    """The most by which D(Q(x)) may differ from x, element by element of whole blocks."""
    size = np.abs(values.astype(np.float64))
    if wire == "bf16":
        return 2.0**-8 * size + 2.0**-134
    largest = size.reshape(-1, BLOCK).max(1, keepdims=True)
    if wire == "int8":
        return ((largest * (1 + 2.0**-12) / 254 + 2.0**-127) * np.ones(BLOCK)).reshape(-1)
    share = 2.0**-4 * size.reshape(-1, BLOCK) + 2.0**-10 * largest / LARGEST["fp8"]
    return (share * (1 + 2.0**-4) + 2.0**-127).reshape(-1)


def bound(rows: list[Floats], total: Floats, result: Floats, wire: str) -> Floats:
    """The bound of an all_reduce of fp32: both points, the sum in fp32, the last rounding."""
    largest = sum(
        np.abs(row.astype(np.float64)).reshape(-1, BLOCK).max(1, keepdims=True) for row in rows
    )
    sums = len(rows) * 2.0**-23 * (largest * np.ones(BLOCK)).reshape(-1)
    points = sum(point(row, wire) for row in rows) + point(total, wire)
    return (1 + 2.0**-11) * points + sums + 2.0**-24 * np.abs(result.astype(np.float64))


@pytest.mark.long
@pytest.mark.parametrize("num_nodes", [2, 3, 5])
@pytest.mark.parametrize("wire", WIRES)
def test_the_bound_holds_and_is_nearly_met(wire: str, num_nodes: int) -> None:
    most = 0.0
    for blocks in (*random_blocks(num_nodes), *special_blocks(num_nodes)):
        rows = [one.astype(np.float32).reshape(-1) for one in blocks]
        total = add([through_wire(row, wire) for row in rows])
        result = through_wire(total, wire)
        exact = sum(row.astype(np.float64) for row in rows)
        far = np.abs(result.astype(np.float64) - exact)
        limit = bound(rows, total, result, wire)
        assert (far <= limit).all(), (far / limit).max()
        most = max(most, float((far / limit).max()))
    assert most >= 0.7, most


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 127, 128, 300])
def test_what_is_not_finite_is_not_lost(wire: str, odd: float, place: int) -> None:
    values = np.ones(301, np.float32)
    values[place] = odd
    with np.errstate(all="ignore"):
        found = through_wire(values, wire)
    if wire == "bf16":
        assert np.array_equal(found, values, equal_nan=True)
        return
    first = place // BLOCK * BLOCK
    assert np.isnan(found[first : first + BLOCK]).all()
    assert np.isfinite(np.delete(found, np.arange(first, min(first + BLOCK, 301)))).all()


def test_known_codes() -> None:
    """By hand: a = 254 gives the scale 2, so that odd numbers are ties, which go to even codes."""
    values = np.array([254, 1, 3, -5, -254, 0.5], np.float32)
    assert through_wire(values, "int8").tolist() == [254, 0, 4, -4, -254, 0]
    # a = 448 gives the scale 1; e4m3 has 4 digits.
    values = np.array([448, 17, 19, -0.3, 2.0**-10, 1.5 * 2.0**-9], np.float32)
    assert through_wire(values, "fp8").tolist() == [448, 16, 20, -0.3125, 0, 2.0**-8]


def test_errors_that_are_fed_back_do_not_add_up() -> None:
    """The sum of what was given is the true sum but for the last error; one not finite is gone."""
    rng = np.random.default_rng(3)
    for wire in WIRES:
        error = np.zeros(300, np.float32)
        true, given = np.zeros(300), np.zeros(300)
        for step in range(50):
            values = rng.standard_normal(300).astype(np.float32)
            if step == 20:
                _, error = with_feedback(np.full_like(values, np.inf), error, wire)
                assert not error.any()
                true, given = np.zeros(300), np.zeros(300)
            got, error = with_feedback(values, error, wire)
            true, given = true + values, given + got
        assert np.allclose(given + error, true, atol=1e-4)
        assert np.abs(given - true).max() < 0.2
