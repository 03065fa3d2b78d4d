# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed's functions raise on the backend "fastcoll" when ranks go wrong."""

from collections.abc import Callable

import mistakes
import pytest
from backends import on_backend

from harness import LATE_S, Attempt, Pool, Setup

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("name", mistakes.MISTAKES)
def test_every_rank_is_told_of_a_mistake(bare_pools: Pools, name: str) -> None:
    rows = bare_pools(mistakes.WORLD).run(on_backend, "fastcoll", mistakes.make, name)
    mistakes.check(name, rows)


def test_a_mistake_that_nobody_is_told_of_is_seen() -> None:
    """The check itself: silence, another text or a late error do not pass."""
    told = Attempt("DesyncError", "rank 1: numel=9, the others numel=8", 0.1)
    name = "another shape"
    mistakes.check(name, [[told, told]] * 3)
    for wrong in (
        Attempt("", "", 0),
        Attempt("RuntimeError", told.text, 0.1),
        Attempt("DesyncError", "rank 1: numel=9", 0.1),
        Attempt("DesyncError", told.text, 30),
    ):
        with pytest.raises(AssertionError):
            mistakes.check(name, [[told, told], [told, wrong], [told, told]])


def test_a_call_that_is_wrong_on_all_ranks_leaves_the_group_usable(bare_pools: Pools) -> None:
    for row in bare_pools(3).run(on_backend, "fastcoll", mistakes.wrong_everywhere):
        assert [one.kind for one in row] == ["UsageError"] * 2


def test_a_rank_that_stays_away_is_named(bare_pools: Pools) -> None:
    first, odd, last = bare_pools(3).run(on_backend, "fastcoll", mistakes.stay_away)
    assert (len(first), len(odd), len(last)) == (4, 0, 2)
    for one in (*first, *last):
        assert one.kind == "CollectiveTimeout"
        assert one.ranks == (mistakes.ODD,)
        assert 0.4 < one.seconds < LATE_S, one


def test_a_rank_that_dies_is_named(fresh_pool: Callable[..., Pool]) -> None:
    outcomes = fresh_pool(3, Setup(init=False)).outcomes(on_backend, "fastcoll", mistakes.die)
    assert outcomes[mistakes.ODD].exit_code == -9
    for rank in (0, 2):
        assert outcomes[rank].value.kind == "PeerLostError"
        assert outcomes[rank].value.ranks == (mistakes.ODD,)
        assert outcomes[rank].value.seconds < LATE_S


def test_a_receive_of_less_than_was_sent(bare_pools: Pools) -> None:
    rows = bare_pools(3).run(on_backend, "fastcoll", mistakes.receive_less)
    for first, then in rows[:2]:
        assert first.kind == then.kind == "DesyncError", (first, then)
        assert "1048577 x float32" in first.text
        assert "1048576 x float32" in first.text
        assert first.seconds < LATE_S
    assert rows[2][1].kind == "DesyncError"


@pytest.mark.slow  # the first import of DDP
def test_models_that_differ(bare_pools: Pools) -> None:
    rows = bare_pools(3).run(on_backend, "fastcoll", mistakes.models_differ)
    for rank, (first, then) in enumerate(rows):
        assert (
            first.kind == "RuntimeError" if rank == mistakes.ODD else first.kind != "RuntimeError"
        )
        assert then.kind == "DesyncError", (rank, then)
        assert then.seconds < LATE_S
    assert "appears not to match" in rows[mistakes.ODD][0].text
