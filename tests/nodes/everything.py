# SPDX-License-Identifier: Apache-2.0
"""All that ranks on several nodes can do, in one go: for ranks that are dear to start."""

from collections.abc import Iterator
from itertools import product

import numpy as np

from tests.nodes.test_any_source import from_anybody
from tests.nodes.test_bounds import WIDE, check_bounds
from tests.nodes.test_node_transfers import everybody_to_everybody
from tests.nodes.test_verbs import (
    LARGE_SIZE,
    SIZES,
    check,
    moves,
    others,
    place,
    reductions,
    uneven,
)
from tests.support import oracle
from tests.support.calls import MOVES, REDUCTIONS, ROOTED, Call
from tests.support.harness import Pool

ODD_SIZES = (1, 17, 1001, 4099, 70_001)


def pairs(world: int) -> Iterator[Call]:
    """Each verb with each dtype, at an odd size."""
    rng = np.random.default_rng(200 + world)
    for verb, dtype in product((*REDUCTIONS, *MOVES), oracle.DTYPES):
        numel = ODD_SIZES[int(rng.integers(len(ODD_SIZES)))]
        options = {"root": int(rng.integers(world)) if verb in ROOTED else 0}
        if verb in REDUCTIONS:
            ops = oracle.ops_of(dtype)
            options |= {"op": ops[int(rng.integers(len(ops)))], "numerics": "same_bits"}
        yield Call(verb, dtype, numel, places=(place(rng), place(rng)), **options)


def large() -> Iterator[Call]:
    """Each verb with several segments."""
    for verb, dtype in product(("all_reduce", "reduce_scatter"), ("float32", "bfloat16")):
        yield Call(verb, dtype, LARGE_SIZE, "SUM", numerics="same_bits")
    for verb in MOVES:
        yield Call(verb, "float32", LARGE_SIZE, root=1 if verb in ROOTED else 0)


def check_everything(pool: Pool, nodes: str) -> None:
    """Every verb, dtype and operation against the oracle; lists, objects, transfers."""
    world = len(nodes)
    check(pool, nodes, [*pairs(world), *reductions(world, SIZES), *moves(world, SIZES)])
    check(pool, nodes, list(large()))
    for dtype in WIDE:  # of numerics="fast"; what becomes of half types differs between carriers
        check_bounds(pool, nodes, dtype)
    for program in (uneven, others, everybody_to_everybody, from_anybody):
        pool.run(program)
