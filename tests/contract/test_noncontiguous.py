# SPDX-License-Identifier: Apache-2.0
"""Tensors whose elements do not lie one after another: the result goes by position, not by memory.

Decides the layouts: permuted, stepped, expanded, of no dimension; another one on each rank, and for
input and output. The memory between the elements must stay as it was.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastcoll
from tests.support.calls import Call, expected, words_in
from tests.support.draw import IN_RANK_ORDER, algorithms_of
from tests.support.harness import Pools, Rank
from tests.support.perform import make

GAP = 77


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tensor of a shape lies in memory: which dimension is outermost, and its steps."""

    order: tuple[int, ...]
    steps: tuple[int, ...]

    def lay(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """All the memory, and the float32 tensor of `shape` in it."""
        whole = torch.full([shape[dim] * self.steps[dim] for dim in self.order], float(GAP))
        cut = whole[tuple(slice(None, None, self.steps[dim]) for dim in self.order)]
        return whole, cut.permute([self.order.index(dim) for dim in range(len(shape))])


@dataclasses.dataclass(frozen=True)
class Case:
    """One call whose arguments have these layouts on each rank."""

    call: Call
    shape: tuple[int, ...]  # of each part
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...] | None  # None: in place
    async_op: bool = False

    def shapes(self, world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the input and of the output: what has a part for each rank has more rows."""
        more = (self.shape[0] * world, *self.shape[1:])
        return (
            more if self.call.verb == "reduce_scatter" else self.shape,
            more if self.call.verb == "all_gather" else self.shape,
        )


def put(tensor: torch.Tensor, words: np.ndarray) -> None:
    tensor.copy_(torch.from_numpy(words.view(np.float32).copy()).view(tensor.shape))


def get(tensor: torch.Tensor) -> np.ndarray:
    return tensor.clone(memory_format=torch.contiguous_format).numpy().view(np.uint32).reshape(-1)


def untouched(whole: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the memory around the tensor's elements holds what it held; ends the tensor."""
    tensor.fill_(GAP)
    return bool((whole == GAP).all())


def perform_case(rank: Rank, case: Case) -> list[tuple[np.ndarray, str]]:
    """The call twice: by Python, unless its plan was known before, and by C++."""
    return [perform_once(rank, case) for _ in range(2)]


def perform_once(rank: Rank, case: Case) -> tuple[np.ndarray, str]:
    in_shape, out_shape = case.shapes(rank.world_size) if case.shape else ((), ())
    whole, ins = case.inputs[rank.rank].lay(in_shape)
    words = words_in(case.call, rank.rank, rank.world_size)
    if case.call.verb != "broadcast" or rank.rank == case.call.root:
        put(ins, words)
    outs_whole, outs = whole, ins
    if case.outputs is not None:
        outs_whole, outs = case.outputs[rank.rank].lay(out_shape)
    work = make(rank.comm, case.call, ins, outs, async_op=case.async_op)
    if case.async_op:
        work.wait()
    result = get(outs) if case.call.gets(rank.rank) else words[:0]
    problem = ""
    if outs is not ins and not np.array_equal(get(ins), words):
        problem = "the input changed"
    if not (untouched(outs_whole, outs) and (outs is ins or untouched(whole, ins))):
        problem = "something between the elements was written"
    return result, problem


WORLD = 3


@st.composite
def cases(draw: st.DrawFn) -> Case:
    verb = draw(
        st.sampled_from(["all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather"])
    )
    in_parts = verb in ("reduce_scatter", "all_gather")
    dims = draw(st.integers(1 if in_parts else 0, 4))
    # Mostly small, and now and then wide enough for tiles of a transposed matrix.
    extent = st.integers(0, 5) | st.integers(30, 70) if dims < 4 else st.integers(0, 5)
    shape = tuple(draw(st.lists(extent, min_size=dims, max_size=dims)))
    layout = st.builds(
        Layout,
        st.permutations(range(dims)).map(tuple),
        st.tuples(*[st.integers(1, 3)] * dims),
    )
    everyone = st.tuples(*[layout] * WORLD)
    call = Call(
        verb,
        "float32",
        math.prod(shape),
        draw(st.sampled_from(["SUM", "MAX"])),
        draw(st.sampled_from(IN_RANK_ORDER)),
        root=draw(st.integers(0, WORLD - 1)),
        seed=draw(st.integers(0, 1000)),
    )
    in_place = verb == "broadcast" or (not in_parts and draw(st.booleans()))
    if call.algorithm not in algorithms_of(verb):
        call = dataclasses.replace(call, algorithm="auto")
    outputs = None if in_place else draw(everyone)
    return Case(call, shape, draw(everyone), outputs, draw(st.booleans()))


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
def test_another_layout_on_each_rank(pools: Pools, case: Case) -> None:
    wants = expected(case.call, WORLD)
    for rank, turns in enumerate(pools(WORLD).run(perform_case, case)):
        for words, problem in turns:
            assert not problem
            assert np.array_equal(words, wants[rank])


def run_shapes(rank: Rank, kind: str) -> list[Any]:
    """Layouts that need more than steps and an order; the result as nested lists."""
    mine = torch.arange(24.0).reshape(2, 3, 2, 2) + rank.rank
    if kind == "channels_last":
        tensor = mine.contiguous(memory_format=torch.channels_last)
        fastcoll.all_reduce(tensor, group=rank.comm)
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        return tensor.tolist()
    if kind == "expanded input":
        out = torch.empty(4, 5)
        fastcoll.all_reduce(torch.full((1, 5), float(rank.rank)).expand(4, 5), out=out)
        return out.tolist()
    if kind == "no dimension":
        tensor = torch.tensor(float(rank.rank))
        fastcoll.all_reduce(tensor)
        return [tensor.item()]
    if kind == "conjugate":
        out = torch.empty(2, dtype=torch.complex64)
        fastcoll.all_reduce(torch.tensor([1 + 2j, 3j]).conj(), out=out)
        return out.tolist()
    base = torch.zeros(3, 8)
    base[:, 2] = torch.arange(3.0) + rank.rank
    fastcoll.all_reduce(base[:, 2])
    return base.tolist()


def test_layouts_with_a_name(pools: Pools) -> None:
    def summed(kind: str) -> Any:
        results = pools(2).run(run_shapes, kind)
        assert results[0] == results[1]
        return results[0]

    doubled = 2 * torch.arange(24.0).reshape(2, 3, 2, 2) + 1
    assert summed("channels_last") == doubled.tolist()
    assert summed("expanded input") == [[1.0] * 5] * 4
    assert summed("no dimension") == [1.0]
    assert summed("conjugate") == [2 - 4j, -6j]
    column = [[0.0] * 2 + [2.0 * row + 1] + [0.0] * 5 for row in range(3)]
    assert summed("a column") == column


def negated(rank: Rank, numel: int) -> list[float]:
    """Greatest of plain and of lazily negated tensors in turn; later ones take the short way."""
    found = []
    for turn in range(20):
        # A new object each time: it may lie where one of the other kind lay.
        tensor = torch.full((numel,), float(turn + rank.rank))
        given = torch._neg_view(tensor) if turn % 2 else tensor
        assert given.is_neg() == bool(turn % 2)
        fastcoll.all_reduce(given, fastcoll.ReduceOp.MAX, rank.comm)
        assert bool((given == given[0]).all())
        found.append(given[-1].item())
    return found


@pytest.mark.parametrize("numel", [1, 2, 3_000])
def test_a_sign_that_is_only_marked(pools: Pools, numel: int) -> None:
    wants = [float(-turn if turn % 2 else turn + 1) for turn in range(20)]
    assert pools(2).run(negated, numel) == [wants, wants]
