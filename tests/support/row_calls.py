# SPDX-License-Identifier: Apache-2.0
"""Reductions with `then=RMSNorm(...)` as data: drawn, made by ranks, compared with the oracle.

Decides the shapes, the memory and the options that a site meets. Expected is the plain call of the
same site and then the steps of `row_oracle`, so every algorithm and every carrier has an oracle.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import fastcoll
from fastcoll.api import VERBS
from tests.support import row_oracle
from tests.support.calls import Call
from tests.support.draw import IN_ANY_ORDER, algorithms_of
from tests.support.harness import Rank
from tests.support.oracle import FLOATS, Bits, word_of
from tests.support.row_oracle import Norm
from tests.support.sites import Site

ROW_DTYPES = ("float32", "float16", "bfloat16")
CODE_DTYPES = ("int8", "float8_e4m3fn")
COLUMNS = (1, 3, 64, 100, 4096, 8192, 70_000)
NUM_ROWS = (1, 2, 7, 0, 513)
KINDS = ("private", "symmetric", "strided", "numpy")


@dataclass(frozen=True)
class RowCall:
    """One reduction and the steps behind it.

    Attributes:
        call: The reduction; its `numel` is that of the result.
        columns: Of a row of the result.
        kind: Where the input lies: a kind of `Place`.
        in_place: The rows go to the input, or to its part.
        sums: "none": no residual; "residual": the sums go there; "apart": elsewhere.
        weight: Its dtype; "" is none.
        out: The dtype of the output; codes have scales.
        way: "" is the usual one; "python": the declared function; "async": by a Work.
    """

    call: Call
    columns: int
    kind: str = "private"
    in_place: bool = True
    sums: str = "residual"
    weight: str = "float32"
    out: str = "float32"
    eps: float = 1e-6
    offset: float = 0.0
    rounds_first: bool = False
    wide_sum: bool = False
    way: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        return self.call.numel // self.columns, self.columns

    def input(self, rank: int, world: int) -> Bits:
        """Return this rank's input; every fifth call has a row that is not finite."""
        num_rows = self.shape[0] * (world if self.call.verb == "reduce_scatter" else 1)
        found = words(self.call.dtype, (num_rows, self.columns), self.call.seed + 17 * rank + 2)
        if found.size and self.call.seed % 5 == 0:
            found[0, self.call.seed % self.columns] = FLOATS[self.call.dtype].infinity + rank % 2
        return found

    def norm(self) -> Norm:
        weight = words(self.weight, (self.columns,), self.call.seed) if self.weight else None
        flags = self.rounds_first, self.wide_sum
        return Norm(self.eps, self.offset, *flags, weight, self.weight or "float32")

    def residual(self, rank: int) -> Bits | None:
        """Return this rank's residual: another one on each rank, as rows are local."""
        if self.sums == "none":
            return None
        return words(self.call.dtype, self.shape, self.call.seed + 31 * rank + 1)


def words(dtype: str, shape: tuple[int, ...], seed: int) -> Bits:
    """Return bits of random numbers of several magnitudes."""
    random = np.random.default_rng(seed)
    numbers = random.standard_normal(shape, np.float32)
    numbers *= np.exp2(random.integers(-6, 3, shape)).astype(np.float32)
    return bits_of(torch.from_numpy(numbers).to(getattr(torch, dtype)))


def draw(site: Site, verb: str, most_numel: int = 1 << 17) -> Iterator[RowCall]:
    """Yield calls: every dtype and algorithm with every width; the other options take turns."""
    random = np.random.default_rng([site.world, len(site.nodes), len(verb)])
    kinds = [kind for kind in KINDS if kind in site.limits.kinds]
    turns = itertools.cycle(
        itertools.product(("", "python", "async", ""), (True, False), ("residual", "none", "apart"))
    )
    for dtype, algorithm in itertools.product(ROW_DTYPES, algorithms_of(verb, site.limits)):
        for columns, most_rows in itertools.product(COLUMNS, NUM_ROWS):
            way, in_place, sums = next(turns)
            num_rows = min(most_rows, max(1, most_numel // columns // site.world))
            is_coded = random.integers(4) == 0
            kind = str(random.choice(kinds))
            if kind == "numpy" and dtype == "bfloat16":
                kind = "private"
            yield RowCall(
                Call(
                    verb,
                    dtype,
                    num_rows * columns,
                    str(random.choice(["SUM", "SUM", "AVG"])),
                    algorithm,
                    "fast" if algorithm in IN_ANY_ORDER else site.limits.numerics,
                    seed=int(random.integers(100_000)),
                ),
                columns,
                kind,
                in_place and not is_coded and (kind != "strided" or verb == "all_reduce"),
                sums,
                str(random.choice(["", dtype, *ROW_DTYPES])),
                str(random.choice(CODE_DTYPES)) if is_coded else dtype,
                float(random.choice([1e-6, 1e-5, 0.0])),
                float(random.choice([0.0, 0.0, 1.0])),
                bool(random.integers(2)),
                bool(random.integers(2)),
                way,
            )


# ---- on a rank -----------------------------------------------------------------------------------


def tensor_of(bits: Bits, dtype: str) -> torch.Tensor:
    """Return a new tensor with these bits."""
    signed = np.ascontiguousarray(bits).view(f"i{bits.itemsize}").copy()
    return torch.from_numpy(signed).view(getattr(torch, dtype))


def bits_of(array: Any) -> Bits:
    """Return the bits of a tensor or array, in an array of its own."""
    if isinstance(array, torch.Tensor):
        signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[array.element_size()]
        array = array.detach().contiguous().view(signed).numpy()
    return np.ascontiguousarray(array).view(f"u{array.itemsize}").copy()


def laid(comm: Any, tensor: torch.Tensor, kind: str) -> Any:
    """Return the elements in memory of a kind."""
    if kind == "numpy":
        return tensor.numpy()
    if kind == "strided":
        apart = tensor.new_zeros((*tensor.shape, 2))[..., 0]
        return apart.copy_(tensor)
    if kind == "symmetric":
        return comm.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return tensor


Found = dict[str, Bits]


def perform_rows(rank: Rank, calls: Sequence[RowCall]) -> list[Found]:
    """Make each call plainly, then with the rows; return the bits of all results."""
    found = []
    for number, one in enumerate(calls):
        try:
            found.append(_perform(rank, one))
        except BaseException as error:
            error.add_note(f"in call {number} of {len(calls)}: {one}")
            raise
    return found


def _perform(rank: Rank, one: RowCall) -> Found:
    comm, call = rank.comm, one.call
    scatters = call.verb == "reduce_scatter"
    given = one.input(rank.rank, rank.world_size)
    options = {"op": getattr(fastcoll.ReduceOp, call.op), "algorithm": call.algorithm}
    options |= {"numerics": call.numerics, "group": comm}
    dtype = getattr(torch, call.dtype)

    def make(verb: Any, x: Any, out: Any, **how: Any) -> Any:
        if scatters:
            return verb(out, x, **options, **how)
        return verb(x, **options, **how, **({} if out is x else {"out": out}))

    name = "reduce_scatter_tensor" if scatters else "all_reduce"
    plain = torch.empty(one.shape, dtype=dtype)
    make(getattr(fastcoll, name), tensor_of(given, call.dtype), plain)
    x = laid(comm, tensor_of(given, call.dtype), one.kind)
    if one.in_place:
        part = slice(rank.rank * one.shape[0], (rank.rank + 1) * one.shape[0])
        out = x[part] if scatters else x
    else:
        out = torch.empty(one.shape, dtype=getattr(torch, one.out))
    residual_bits, norm = one.residual(rank.rank), one.norm()
    residual = None if residual_bits is None else tensor_of(residual_bits, call.dtype)
    summed = torch.empty(one.shape, dtype=dtype) if one.sums == "apart" else None
    scales = torch.empty(one.shape[0]) if one.out in CODE_DTYPES else None
    weight = None if norm.weight is None else tensor_of(norm.weight, norm.weight_dtype)
    then = fastcoll.RMSNorm(
        weight,
        one.eps,
        residual=residual,
        summed=summed,
        offset=one.offset,
        rounds_first=one.rounds_first,
        wide_sum=one.wide_sum,
        scales=scales,
    )
    verb = VERBS[name] if one.way == "python" else getattr(fastcoll, name)
    work = make(verb, x, out, then=then, **({"async_op": True} if one.way == "async" else {}))
    if work is not None:
        assert work.result()[0] is out
    found = {"plain": bits_of(plain), "out": bits_of(out)}
    if residual is not None:
        found["summed"] = bits_of(residual if summed is None else summed)
        assert summed is None or np.array_equal(bits_of(residual), residual_bits)
    if scales is not None:
        found["scales"] = bits_of(scales)
    if not one.in_place:
        assert np.array_equal(bits_of(x), given), "changed its input"
    return found


# ---- against the oracle --------------------------------------------------------------------------


def problems_of(calls: Sequence[RowCall], results: Sequence[Sequence[Found]]) -> list[str]:
    """Return the calls whose results differ from the plain result and then the steps."""
    problems = []
    for rank, found_by_call in enumerate(results):
        for one, found in zip(calls, found_by_call, strict=True):
            for name, want in expected(one, rank, found["plain"]).items():
                wrong = found[name] != want
                if wrong.any():
                    first = np.argwhere(wrong)[0].tolist()
                    problems.append(f"rank {rank}: {wrong.sum()} of {name} at {first}: {one}")
    return problems


def expected(one: RowCall, rank: int, plain: Bits) -> Found:
    """Return the bits of all that a rank finds behind a call."""
    dtype, residual = one.call.dtype, one.residual(rank)
    summed, out = row_oracle.rms_norm(plain, dtype, one.norm(), residual)
    want = {"out": out}
    if residual is not None:
        want["summed"] = summed
    if one.out in CODE_DTYPES:
        want["out"], scales = row_oracle.quantise(out, dtype, one.out)
        want["scales"] = scales.view(word_of("float32"))
    return want


def check_rows(site: Site, calls: Sequence[RowCall], batch: int = 60) -> int:
    """Make calls on every rank of a site and compare; return how many."""
    for first in range(0, len(calls), batch):
        part = calls[first : first + batch]
        problems = problems_of(part, site.run(perform_rows, part))
        assert not problems, f"{len(problems)} wrong results:\n" + "\n".join(problems[:12])
    return len(calls)
