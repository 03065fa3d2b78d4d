# SPDX-License-Identifier: Apache-2.0
"""A program whose types mypy checks in the hooks: what a call returns, in each of its forms.

Nothing runs it. `assert_type` fails where mypy finds another type.
"""

from datetime import timedelta
from typing import assert_type

import numpy as np
import torch

import fastcoll
from fastcoll.calls.transfer_work import AnyTransferWork

Sizes = tuple[torch.Tensor, list[int]]


def return_types(group: fastcoll.Group, is_later: bool) -> None:
    """Each overload of the functions."""
    t, a = torch.ones(4), np.ones(4)
    assert_type(fastcoll.all_reduce(t, "max"), None)
    assert_type(fastcoll.all_reduce(a, fastcoll.ReduceOp.MAX, async_op=True), fastcoll.Work)
    assert_type(fastcoll.all_reduce(t, "sum", None, is_later), fastcoll.Work | None)
    assert_type(fastcoll.all_to_all_single(None, t, None, [2, 2]), Sizes)
    assert_type(fastcoll.all_to_all_single(t, t), None)
    assert_type(fastcoll.all_to_all_single(t, t, async_op=True), fastcoll.Work)
    assert_type(fastcoll.isend(t, 1), AnyTransferWork)
    assert_type(fastcoll.isend(t, 1).wait(), bool)
    assert_type(fastcoll.recv(t), int)
    assert_type(fastcoll.all_gather_single(t, t, group, async_op=True), fastcoll.Work)
    fastcoll.all_reduce(t, "MAX")  # type: ignore[call-overload]
    fastcoll.all_reduce(t, "mux")  # type: ignore[call-overload]
    fastcoll.all_reduce([1.0])  # type: ignore[call-overload]


def methods(group: fastcoll.Group) -> None:
    """The same of the methods, and groups of both kinds."""
    t = torch.ones(4)
    assert_type(group.all_reduce(t), None)
    assert_type(group.all_reduce(t, async_op=True).is_completed(), bool)
    assert_type(group.all_to_all_single(None, t, None, [2, 2]), Sizes)
    assert_type(group.barrier(async_op=True), fastcoll.Work)
    works: list[fastcoll.Work] = [group.isend(t, 1), group.irecv(t, 1)]
    for work in works:
        work.wait(timedelta(seconds=1))


def main() -> None:
    """Every way to a group gives the same type."""
    with fastcoll.init() as group, fastcoll.new_group([0], timeout=3) as part:
        assert_type(part.is_member, bool)
        methods(group)
        methods(part)
        methods(part.new_group())
        methods(fastcoll.shrink(group))
        assert_type(fastcoll.get_rank(part) + part.world_size, int)
