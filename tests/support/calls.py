# SPDX-License-Identifier: Apache-2.0
"""Collective calls as data: the inputs of the ranks, their memory, and the expected results.

Decides inputs: every special value, and numbers whose sum depends on the order. Decides the words
for the memory of arguments, and the comparison with the oracle. Runs nothing: perform.py does.
"""

import dataclasses
import random
from collections.abc import Sequence
from functools import cache

import numpy as np

from tests.support import oracle

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
MOVES = ("all_gather", "broadcast", "gather", "scatter", "all_to_all")
ROOTED = ("broadcast", "gather", "scatter", "reduce")


def _is_numpys(dtype: str) -> bool:
    try:
        return np.dtype(dtype).isbuiltin == 1
    except TypeError:
        return False


NUMPY_DTYPES = tuple(filter(_is_numpys, oracle.DTYPES))

_PERIOD = 100_003  # prime, so that no chunk of a long message repeats its neighbour


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the arguments of one rank lie.

    Attributes:
        kind: "private" (a tensor), "numpy" (an array), "symmetric" (the library's memory),
            "strided" (every second element of a tensor) or "device" (a tensor on a rank's GPU).
        offset: Distance from an aligned address; in bytes for "private" and "numpy", else in
            elements.
        in_place: Input and output share memory, in the usual way of the verb.
        output: Where the output lies, if not in place; None is the same kind and offset again.
    """

    kind: str = "private"
    offset: int = 0
    in_place: bool = False
    output: "Place | None" = None

    @property
    def kinds(self) -> set[str]:
        return {self.kind} | (self.output.kinds if self.output else set())


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective call; rank r uses `places[r % len(places)]`."""

    verb: str
    dtype: str
    numel: int
    op: str = "SUM"
    algorithm: str = "auto"
    numerics: str | None = None
    root: int = 0
    places: tuple[Place, ...] = (Place(),)
    seed: int = 0

    def place(self, rank: int) -> Place:
        return self.places[rank % len(self.places)]

    def numels(self, world: int) -> tuple[int, int]:
        """Return the number of elements of the input and of the output."""
        many = self.numel * world
        return (
            many if self.verb in ("reduce_scatter", "scatter", "all_to_all") else self.numel,
            many if self.verb in ("all_gather", "gather", "all_to_all") else self.numel,
        )

    def gives(self, rank: int) -> bool:
        """Return whether a rank has an input."""
        return self.verb not in ("broadcast", "scatter") or rank == self.root

    def gets(self, rank: int) -> bool:
        """Return whether a rank has an output."""
        return self.verb not in ("gather", "reduce") or rank == self.root


BARRIER = Call("barrier", "uint8", 0)


def mixed(world: int, count: int, seed: int) -> list[Call]:
    """Return small calls of all verbs in a random order."""
    rng = random.Random(seed)
    calls = []
    for _ in range(count):
        verb = rng.choice([*REDUCTIONS, *MOVES])
        dtype = rng.choice(["float32", "bfloat16", "int64", "uint8"])
        place = Place("private", rng.randrange(5), rng.random() < 0.5)
        calls.append(
            Call(
                verb,
                dtype,
                rng.choice([0, 1, 2, 5, 60, 500]),
                rng.choice(["SUM", "MAX"]),
                root=rng.randrange(world) if verb in ROOTED else 0,
                places=(place,),
                seed=rng.randrange(1000),
            )
        )
    return calls


# ---- inputs ---------------------------------------------------------------------------------


def _float_words(dtype: str, rank: int, plain: bool) -> np.ndarray:
    form = oracle.FLOATS[dtype]
    wide = np.float64 if dtype == "float64" else np.float32
    rng = np.random.default_rng([oracle.DTYPES.index(dtype), rank, plain])
    numbers = rng.standard_normal(_PERIOD).astype(wide)
    if plain:
        return oracle.encode(np.clip(numbers, -2, 2), dtype)
    words = oracle.encode(numbers * wide(4), dtype)
    # All ranks agree on the kind of an element's number: else every sum has a NaN in it.
    kind = np.random.default_rng(oracle.DTYPES.index(dtype)).random(_PERIOD)
    anything = rng.integers(0, 2 * form.sign_bit, _PERIOD, form.word)
    infinity, sign = form.infinity, form.sign_bit
    special = [0, sign, 1, sign + 1, infinity - 1, sign + infinity - 1, infinity, infinity + 1]
    special += [sign + infinity, 1 << form.mantissa_bits, (1 << form.mantissa_bits) - 1]
    specials = rng.choice(np.array(special, form.word), _PERIOD)
    # Absorbed or not, by the order of the sum.
    big = 2.0**15 if dtype == "float16" else 2.0 ** (53 if dtype == "float64" else 24)
    triple = [big, -big, big * 2.0**-24, 1.0, 0.0]
    triples = oracle.encode(rng.choice(np.array(triple, wide), _PERIOD), dtype)
    words = np.where(kind < 0.15, anything, words)
    words = np.where((kind >= 0.15) & (kind < 0.22), specials, words)
    return np.where((kind >= 0.22) & (kind < 0.5), triples, words).astype(form.word)


@cache
def _base(dtype: str, rank: int, plain: bool) -> np.ndarray:
    """Return a period of words, from which all inputs of a rank are cut."""
    if dtype in oracle.COMPLEX or dtype in oracle.FLOATS:
        return _float_words(oracle.COMPLEX.get(dtype, dtype), rank, plain)
    rng = np.random.default_rng([oracle.DTYPES.index(dtype), rank])
    word = oracle.word_of(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, _PERIOD, word)
    top = 1 << (8 * word.itemsize - 1)
    special = rng.choice(np.array([0, 1, top, top - 1, 2 * top - 1], word), _PERIOD)
    words = rng.integers(0, 2 * top - 1, _PERIOD, word, endpoint=True)
    return np.where(rng.random(_PERIOD) < 0.1, special, words)


def words_in(call: Call, rank: int, world: int) -> np.ndarray:
    """Return the bits of a rank's input of a call."""
    base = _base(call.dtype, rank, call.numerics == "fast")
    count = call.numels(world)[0] * oracle.lanes(call.dtype)
    start = call.seed * 7919 % _PERIOD
    if start + count <= _PERIOD:
        return base[start : start + count]
    return np.tile(base, -(-(start + count) // _PERIOD))[start : start + count]


# ---- expected results -----------------------------------------------------------------------


def expected(
    call: Call, world: int, nodes: Sequence[Sequence[int]] | None = None
) -> list[np.ndarray]:
    """Return the expected bits of each rank's output; none where it has no output."""
    if call.verb == "broadcast":
        return [words_in(call, call.root, world)] * world
    if call.verb == "scatter":
        return np.split(words_in(call, call.root, world), world)
    inputs = [words_in(call, rank, world) for rank in range(world)]
    if call.verb == "all_to_all":
        parts = [np.split(words, world) for words in inputs]
        return [np.concatenate([row[rank] for row in parts]) for rank in range(world)]
    if call.verb in ("all_gather", "gather") or world == 1:  # one rank has nothing to combine
        result = np.concatenate(inputs)
    else:
        result = oracle.reduce(inputs, call.dtype, call.op, world, nodes)
    if call.verb == "reduce_scatter":
        return np.split(result, world)
    return [result if call.gets(rank) else result[:0] for rank in range(world)]


def _too_far(call: Call, world: int, rank: int, got: np.ndarray) -> np.ndarray:
    """Return where a result of numerics="fast" is too far from the exact one for roundings."""
    dtype = oracle.COMPLEX.get(call.dtype, call.dtype)
    form = oracle.FLOATS[dtype]
    inputs = [oracle.decode(words_in(call, peer, world), dtype) for peer in range(world)]
    numbers = np.array(inputs, np.longdouble)
    if call.verb == "reduce_scatter":
        numbers = np.split(numbers, world, axis=1)[rank]
    if call.op == "PRODUCT":
        exact, scale = numbers.prod(0), np.abs(numbers).prod(0)
    else:
        share = world if call.op == "AVG" else 1
        exact, scale = numbers.sum(0) / share, np.abs(numbers).sum(0) / share
    accumulator = 2.0 ** -(53 if dtype == "float64" else 24)
    least = np.longdouble(2) ** (form.least_exponent - form.mantissa_bits)
    bound = 2.0 ** -(form.mantissa_bits + 1) * np.abs(exact) * 1.01 + least
    bound += 2 * world * accumulator * scale
    return ~(np.abs(oracle.decode(got, dtype) - exact) <= bound)


def difference(call: Call, world: int, rank: int, want: np.ndarray, got: np.ndarray) -> str:
    """Return the difference of a rank's output from the expected one; empty if there is none."""
    if got.shape != want.shape:
        return f"{call} on rank {rank} of {world}: {got.size} words, not {want.size}"
    if want.size and call.numerics == "fast" and oracle.order_matters(call.dtype, call.op):
        wrong = _too_far(call, world, rank, got)
    else:
        wrong = got != want
    if not wrong.any():
        return ""
    first = int(np.flatnonzero(wrong)[0])
    at = first + (rank * want.size if call.verb == "reduce_scatter" else 0)
    inputs = [words_in(call, peer, world) for peer in range(world)]
    column = [f"{int(words[at % words.size]):#x}" for words in inputs]
    return (
        f"rank {rank} of {world}: {int(wrong.sum())} of {want.size} words differ; word {first} is "
        f"{int(got[first]):#x}, not {int(want[first]):#x}; inputs {', '.join(column)}; {call}"
    )
