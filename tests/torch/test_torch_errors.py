# SPDX-License-Identifier: Apache-2.0
"""Errors of torch.distributed's functions on both of fastcoll's backends when ranks go wrong."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.support import mistakes
from tests.support.backends import on_backend
from tests.support.harness import LATE_S, Attempt, Pool, Rank, attempt

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("name", mistakes.MISTAKES)
def test_every_rank_is_told_of_a_mistake(backend_pools: Pools, name: str) -> None:
    rows = backend_pools(mistakes.WORLD).run(on_backend, "fastcoll", mistakes.make, name)
    mistakes.check(name, rows)


def test_a_mistake_that_nobody_is_told_of_is_seen() -> None:
    """The check itself: silence, another text or a late error do not pass."""
    text = "numel differs: 8 on rank 0, 9 on rank 1. Rank 0 called all_reduce(SUM, numel=8)"
    told = Attempt("DesyncError", text, 0.1)
    name = "two calls in another order"
    mistakes.check(name, [[told, told]] * 3)
    for wrong in (
        Attempt("", "", 0),
        Attempt("RuntimeError", told.text, 0.1),
        Attempt("DesyncError", "numel differs: 9 on rank 1", 0.1),
        Attempt("DesyncError", told.text, 30),
    ):
        with pytest.raises(AssertionError):
            mistakes.check(name, [[told, told], [told, wrong], [told, told]])


def test_a_call_that_is_wrong_on_all_ranks_leaves_the_group_usable(backend_pools: Pools) -> None:
    for row in backend_pools(3).run(on_backend, "fastcoll", mistakes.wrong_everywhere):
        assert [one.kind for one in row] == ["UsageError"] * 2


def test_a_receive_of_less_than_was_sent(backend_pools: Pools) -> None:
    rows = backend_pools(3).run(on_backend, "fastcoll", mistakes.receive_less)
    for first, then in rows[:2]:
        assert first.kind == then.kind == "DesyncError", (first, then)
        assert "1048577 x float32" in first.text
        assert "1048576 x float32" in first.text
        assert first.seconds < LATE_S
    assert rows[2][1].kind == "DesyncError"


@pytest.mark.slow  # the first import of DDP
def test_models_that_differ(backend_pools: Pools) -> None:
    rows = backend_pools(3).run(on_backend, "fastcoll", mistakes.models_differ)
    for rank, (first, then) in enumerate(rows):
        assert (
            first.kind == "RuntimeError" if rank == mistakes.ODD else first.kind != "RuntimeError"
        )
        assert then.kind == "DesyncError", (rank, then)
        assert then.seconds < LATE_S
    assert "appears not to match" in rows[mistakes.ODD][0].text


def known_then_wrong(rank: Rank) -> list[Attempt]:
    """Errors of calls whose plan is known, in every way to meet them."""
    good, other = torch.ones(8), torch.ones(9)
    for tensor in (good, other):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
    work = dist.all_reduce(other if rank.rank else good, async_op=True)
    assert work is not None
    future = work.get_future()
    seen = [attempt(work.wait), attempt(future.wait), attempt(future.wait), attempt(work.wait)]
    seen.append(attempt(dist.all_reduce, good))
    return [*seen, attempt(dist.all_reduce(good, async_op=True).wait)]  # type: ignore[union-attr]


def test_errors_keep_their_type(backend_pools: Pools) -> None:
    for row in backend_pools(2).run(on_backend, "fastcoll", known_then_wrong):
        for one in row:
            assert one.kind == "DesyncError", one
            assert "numel differs: 8 on rank 0, 9 on rank 1" in one.text
            assert one.seconds < LATE_S


def freed(rank: Rank) -> list[str]:
    """A tensor without its memory, when its plan is known, and sent."""
    tensor = torch.ones(500)
    for _ in range(2):
        dist.all_reduce(tensor)
    tensor.untyped_storage().resize_(0)
    return [
        attempt(dist.all_reduce, tensor).kind,
        attempt(dist.isend, tensor, 1 - rank.rank).kind,
    ]


def test_memory_that_was_freed(backend_pools: Pools) -> None:
    assert backend_pools(2).run(on_backend, "fastcoll", freed) == [["UsageError"] * 2] * 2
