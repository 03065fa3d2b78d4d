# SPDX-License-Identifier: Apache-2.0
"""Every verb with each of some dtypes at odd sizes, on each map of two nodes: other calls on each.

test_verbs.py gives each dtype and operation to one verb; here each verb gets a type of every kind.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from tests.nodes.test_verbs import Clusters, check, place
from tests.support import oracle
from tests.support.calls import MOVES, REDUCTIONS, ROOTED, Call

MAPS = ("aabb", "aaab", "abab")
# A float, a half type, an integer, pairs of floats, 8 bits of a float, and what has no sum.
DTYPES = ("float32", "bfloat16", "int64", "complex64", "float8_e4m3fn", "bool")
VERBS = (*REDUCTIONS, *MOVES)
# Elements: of a packet, and beyond one whatever the type and verb (64 KiB; of one byte).
SMALL_SIZES, LARGE_SIZES = (1, 3, 17, 101, 1001), (65_537, 70_001, 81_919)


def calls_on(nodes: str) -> Iterator[Call]:
    """Every verb and dtype, small and large; sizes, operations, roots and places by the map."""
    world = len(nodes)
    rng = np.random.default_rng([MAPS.index(nodes), world])
    for verb, dtype, sizes in product(VERBS, DTYPES, (SMALL_SIZES, LARGE_SIZES)):
        numel = sizes[int(rng.integers(len(sizes)))]
        root = int(rng.integers(world)) if verb in ROOTED else 0
        options = {"root": root, "seed": int(rng.integers(1000))}
        if verb in REDUCTIONS:
            ops = oracle.ops_of(dtype)
            options |= {"op": ops[int(rng.integers(len(ops)))], "numerics": "same_bits"}
        yield Call(verb, dtype, numel, places=(place(rng), place(rng)), **options)


@pytest.mark.parametrize(
    "nodes", [MAPS[0], *(pytest.param(nodes, marks=pytest.mark.slow) for nodes in MAPS[1:])]
)
def test_every_verb_and_kind_of_type(clusters: Clusters, nodes: str) -> None:
    check(clusters(nodes), nodes, list(calls_on(nodes)))


def test_each_map_has_calls_of_its_own() -> None:
    lists = [list(calls_on(nodes)) for nodes in MAPS]
    for calls in lists:
        assert len({(call.verb, call.dtype) for call in calls}) == len(VERBS) * len(DTYPES)
    kinds = [(call.verb, call.dtype, call.numel in LARGE_SIZES) for call in lists[0]]
    same = [kind for kind, *calls in zip(kinds, *lists, strict=True) if len(set(calls)) < len(MAPS)]
    assert len(same) < len(kinds) / 10
