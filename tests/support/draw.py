# SPDX-License-Identifier: Apache-2.0
"""Calls of a verb: every dtype, operation and algorithm; sizes, roots and placements take turns.

Decides the calls of a group of some size, within the limits of its site. Knows no
group; `sites.py` does.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from algorithm_names import in_any_order, names_for

from fastcoll.types import Verb
from tests.support import oracle
from tests.support.calls import MOVES, NUMPY_DTYPES, REDUCTIONS, ROOTED, Call, Place

VERBS = (*REDUCTIONS, *MOVES)
ALGORITHMS = ("auto", *names_for(Verb.all_reduce))
IN_ANY_ORDER = in_any_order()
IN_RANK_ORDER = tuple(name for name in ALGORITHMS if name not in IN_ANY_ORDER)
PAIRS = [(dtype, op) for dtype in oracle.DTYPES for op in oracle.ops_of(dtype)]
# A float, a half type, an integer, pairs of floats, 8 bits of a float, and a type without sums.
KINDS_OF_DTYPE = ("float32", "bfloat16", "int64", "complex64", "float8_e4m3fn", "bool")
OFFSETS = (0, 0, 1, 2, 3, 4, 7, 8, 13, 16, 64)


@dataclass(frozen=True)
class Limits:
    """Which calls a site can make.

    Attributes:
        kinds: Where arguments may lie, each as often as it stands here.
        algorithms: Which ones may be asked for.
        numerics: Of reductions; None: "fast" where an algorithm needs that.
        in_place_only: Verbs without an output of their own.
        meaningless: Pairs of dtype and operation that the site refuses.
        lacks: Pairs of verb and algorithm that the site has not.
        repeats: How often a reduction is made; the second call takes the library's short way.
        seed: Another one gives other sizes, roots and placements.
    """

    kinds: tuple[str, ...] = ("private", "private", "symmetric", "strided", "numpy")
    algorithms: tuple[str, ...] = ALGORITHMS
    numerics: str | None = None
    in_place_only: tuple[str, ...] = ()
    meaningless: tuple[tuple[str, str], ...] = ()
    lacks: tuple[tuple[str, str], ...] = ()
    repeats: int = 2
    seed: int = 0


EVERYTHING = Limits()


def algorithms_of(verb: str, limits: Limits = EVERYTHING) -> tuple[str, ...]:
    """Return the algorithms that a call of a verb may ask for."""
    known = names_for(Verb[verb]) if verb in REDUCTIONS else []
    return tuple(
        name
        for name in ("auto", *known)
        if name in limits.algorithms and (verb, name) not in limits.lacks
    )


def small_sizes(world: int) -> list[int]:
    return [0, 1, 2, 3, world - 1, world, world + 1, 7, 16, 17, 63, 511, 513, 1000, 2049, 4097]


def _place(rng: np.random.Generator, verb: str, dtype: str, limits: Limits) -> Place:
    kinds = [kind for kind in limits.kinds if kind != "numpy" or dtype in NUMPY_DTYPES]
    one, other = (
        Place(kinds[rng.integers(len(kinds))], OFFSETS[rng.integers(len(OFFSETS))])
        for _ in range(2)
    )
    in_place = verb in limits.in_place_only or (one.kind != "strided" and bool(rng.integers(2)))
    return replace(one, in_place=in_place, output=other)


def calls_of(
    verb: str,
    world: int,
    sizes: Sequence[int],
    rounds: int = 1,
    limits: Limits = EVERYTHING,
    dtypes: Sequence[str] = oracle.DTYPES,
) -> Iterator[Call]:
    """Yield each dtype, operation and algorithm `rounds` times; of a move, each dtype and root."""
    reduces = verb in REDUCTIONS
    rng = np.random.default_rng([world, VERBS.index(verb), limits.seed])
    turn = itertools.count(int(rng.integers(len(sizes))))
    pairs = [
        (dtype, op)
        for dtype, op in PAIRS
        if dtype in dtypes and (reduces or op == "SUM") and (dtype, op) not in limits.meaningless
    ]
    for _ in range(rounds):
        for (dtype, op), algorithm in itertools.product(pairs, algorithms_of(verb, limits)):
            numel = sizes[next(turn) % len(sizes)]
            roots = list(range(world)) if verb in ROOTED else [0]
            if reduces:
                roots = [roots[rng.integers(len(roots))]]
            numerics = limits.numerics if reduces else None
            if algorithm in IN_ANY_ORDER and oracle.order_matters(dtype, op):
                numerics = "fast"
            repeats = limits.repeats if reduces and algorithm == "auto" else 1
            for root in roots * repeats:
                ranks = 8 if rng.integers(3) == 0 else 1  # a placement for each, or one for all
                places = tuple(_place(rng, verb, dtype, limits) for _ in range(ranks))
                seed = int(rng.integers(100_000))
                yield Call(verb, dtype, numel, op, algorithm, numerics, root, places, seed)


def some(cases: Iterator[Call], count: int, seed: int) -> list[Call]:
    """Return a random choice that is the same in every run."""
    every = list(cases)
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(every), min(count, len(every)), replace=False)
    return [every[index] for index in sorted(chosen)]
