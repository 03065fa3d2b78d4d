# SPDX-License-Identifier: Apache-2.0
"""Fast calls on tensors that are not simply contiguous: who makes them.

test_fast_path.py has those on contiguous ones, test_noncontiguous.py the layouts by chance, and
protocol/native/test_parts.cpp the copies of elements of each size.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.fallbacks import noting
from tests.support.harness import Pools, Rank, attempt


def odd_tensors(rank: Rank) -> dict[str, tuple[Callable[[], Any], bool]]:
    """Calls on tensors that don't lie apart, each in one piece; and whether C++ makes them."""
    comm, me, world = rank.comm, rank.rank, rank.world_size
    matrix = torch.ones(6 * world, 40)
    whole = torch.ones(24 * world)
    mine = whole[24 * me : 24 * (me + 1)]
    left, right = matrix[:, :20], matrix[:, 20:]
    rows, more_rows = torch.ones(6, 40)[:, ::2], torch.ones(6 * world, 40)[:, ::2]
    numbers = torch.ones(9, dtype=torch.complex64)
    same = torch.ones(50)
    return {
        "transposed": (lambda: comm.all_reduce(matrix.t()), True),
        "sliced": (lambda: comm.broadcast(left, 0), True),
        "interleaved": (lambda: comm.all_reduce(left, out=right), True),
        "to a root": (lambda: comm.reduce(left, 0, out=right if me == 0 else None), True),
        "cut into parts": (lambda: comm.reduce_scatter_tensor(rows, more_rows), True),
        "put together": (lambda: comm.all_gather_into_tensor(more_rows, rows), True),
        "one of two": (lambda: comm.all_reduce(left, out=torch.ones(6 * world, 20)), True),
        "asynchronous": (lambda: comm.all_reduce(left, async_op=True).wait(), True),
        "complex": (lambda: comm.all_reduce(numbers), True),
        "scattered in place": (lambda: comm.reduce_scatter_tensor(mine, whole), True),
        "gathered in place": (lambda: comm.all_gather_into_tensor(whole, mine), True),
        "lists in place": (
            lambda: comm.all_gather_into_tensor_coalesced([whole], [mine]),
            True,
        ),
        "its own output": (lambda: comm.all_reduce(same, out=same), True),
        "its own output, of a root": (lambda: comm.reduce(same, 0, out=same), True),
        "conjugated": (
            lambda: comm.all_reduce(numbers.conj(), out=torch.ones_like(numbers)),
            False,
        ),
        "negated": (lambda: comm.all_reduce(torch._neg_view(same), out=torch.ones(50)), False),
        "expanded": (lambda: comm.all_reduce(same[:1].expand(7), out=torch.ones(7)), True),
        "ring": (lambda: comm.all_reduce(left, algorithm="ring", numerics="fast"), False),
        "one between the others": (
            lambda: comm.all_reduce(torch.ones(8).as_strided((2, 3), (3, 2))),
            False,
        ),
        "many dimensions": (
            lambda: comm.all_reduce(torch.ones([2] * 9).permute(0, 8, 2, 7, 4, 6, 1, 3, 5)),
            False,
        ),
    }


def odd_ones_passed_on(rank: Rank) -> list[str]:
    """Those of odd_tensors that are not made by whom they say, the second time."""
    wrong = []
    for name, (call, is_fast) in odd_tensors(rank).items():
        call()
        with noting() as passed:
            call()
        if bool(passed) == is_fast:
            wrong.append(f"{name}: passed on are {[verb for verb, _ in passed]}")
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_odd_tensors_need_no_python(pools: Pools, world: int) -> None:
    assert pools(world).run(odd_ones_passed_on) == [[]] * world


def refused(rank: Rank) -> list[str]:
    """Pairs of strided tensors that overlap in part and were taken, once the plan was known."""
    matrix = torch.ones(20, 40)
    square, numbers = matrix[:, :20], matrix.view(-1)
    rank.comm.all_reduce(torch.ones(20, 20))
    rank.comm.all_reduce(torch.ones(10, 20))
    rank.comm.all_reduce(torch.ones(19, 20))
    pairs = {
        "a column in common": (square, matrix[:, 19:39]),
        "a row in common": (matrix[:10, :20], matrix[9:19, :20]),
        "its own transpose": (square, square.t()),
        "one of them contiguous": (square, numbers[:400].view(20, 20)),
        "another pitch": (square, numbers[:600].view(20, 30)[:, 10:]),
        "around the end of a row": (matrix[:19, :20], numbers[30:790].view(19, 40)[:, :20]),
        "overlapping rows": (torch.ones(10, 20), numbers.as_strided((10, 20), (19, 1))),
        "expanded output": (torch.ones(20, 20), matrix[:20, :1].expand(20, 20)),
    }
    call = rank.comm.all_reduce
    kinds = {name: attempt(call, one, out=out).kind for name, (one, out) in pairs.items()}
    assert bool((matrix == 1).all())
    return [name for name, kind in kinds.items() if kind != "UsageError"]


def test_strided_tensors_that_overlap(pools: Pools) -> None:
    assert pools(1).run(refused) == [[]]


def others_parts(rank: Rank) -> list[str]:
    """Calls that take another rank's part of their own whole, once their plans are known."""
    comm, world = rank.comm, rank.world_size
    whole, apart = torch.ones(30 * world), torch.ones(30)
    mine, others = whole.chunk(world)[rank.rank], whole.chunk(world)[rank.rank - 1]
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "scattered": lambda part: comm.reduce_scatter_tensor(part, whole),
        "gathered": lambda part: comm.all_gather_into_tensor(whole, part),
        "gathered list": lambda part: comm.all_gather_into_tensor_coalesced([whole], [part]),
        "scattered list": lambda part: comm.reduce_scatter_tensor_coalesced([part], [whole]),
    }
    taken = []
    for name, call in calls.items():
        call(apart)
        call(mine)
        if attempt(call, others).kind != "UsageError":
            taken.append(name)
    return taken


def test_the_part_of_another_rank(pools: Pools) -> None:
    assert pools(2).run(others_parts) == [[], []]
