# SPDX-License-Identifier: Apache-2.0
"""Calls that do not match because one was missed, or in which nobody waits; and what may differ.

That each field and each part is compared stands in contract/test_differences.py.
"""

import pytest
import torch

from tests.support.harness import LATE_S, Attempt, Pools, Rank, attempt


def missed_call(rank: Rank) -> list[Attempt]:
    """One rank makes a call less; the next calls look alike but their predecessors differ."""
    group = rank.comm.new_group(timeout_s=15)
    attempts = []
    if rank.rank:
        attempts.append(attempt(group.broadcast, torch.ones(3), rank.rank))
    attempts += [attempt(group.all_reduce, torch.ones(5)) for _ in range(3)]
    group.close()
    return attempts


def test_a_rank_that_missed_a_call(pools: Pools) -> None:
    """Ranks 1 and 2 broadcast to each other first: nobody waits there, the next call tells."""
    for row in pools(3).run(missed_call):
        assert row[-1].kind == "DesyncError"
        assert "broadcast" in row[-1].text
        assert all(one.seconds < LATE_S for one in row)


def after_another_root(rank: Rank, gap: int) -> list[Attempt]:
    """Different roots, some calls in which nobody waits for the odd rank, then one that does."""
    group = rank.comm.new_group(timeout_s=15)
    attempts = [attempt(group.broadcast, torch.ones(3), 0 if rank.rank == 0 else 1)]
    for _ in range(gap):
        attempts.append(attempt(group.broadcast, torch.ones(3), rank.rank))
    attempts.append(attempt(group.barrier))
    group.close()
    return attempts


@pytest.mark.parametrize("gap", [0, 1, 2])
def test_a_difference_that_nobody_waited_on(pools: Pools, gap: int) -> None:
    for row in pools(2).run(after_another_root, gap):
        assert row[-1].kind == "DesyncError", row
        assert "src differs: 0 on rank 0, 1 on rank 1" in row[-1].text
        assert "Found by rank" in row[-1].text
        assert f"in barrier() #{2 + gap}. " in row[-1].text
        assert row[-1].seconds < LATE_S


def others_go_on(rank: Rank) -> list[float]:
    """A desync in one group says nothing about another one."""
    broken = rank.comm.new_group()
    good = rank.comm.new_group()
    first = attempt(broken.all_reduce, torch.ones(3 + rank.rank))
    assert first.kind == "DesyncError", first
    values = []
    for comm in (good, rank.comm):
        tensor = torch.ones(2)
        comm.all_reduce(tensor)
        values.append(tensor[1].item())
    broken.close()
    good.close()
    return values


def test_other_groups_go_on(pools: Pools) -> None:
    assert pools(2).run(others_go_on) == [[2.0, 2.0]] * 2


def asynchronous(rank: Rank) -> list[Attempt]:
    group = rank.comm.new_group(timeout_s=15)
    works = [
        group.all_reduce(torch.ones(3 + (rank.rank == 1) * (number == 2)), async_op=True)
        for number in range(5)
    ]
    attempts = [attempt(work.wait) for work in works]
    group.close()
    return attempts


def test_asynchronous_calls(pools: Pools) -> None:
    for row in pools(3).run(asynchronous):
        assert [one.kind for one in row] == ["", "", *["DesyncError"] * 3]
        assert "numel differs: " in row[2].text
        assert " 3 on rank " in row[2].text
        assert " 4 on rank 1" in row[2].text


def local_differences(rank: Rank) -> list[Attempt]:
    """Shape, strides, place, in or out of place, limits and threads may differ."""
    comm, odd = rank.comm, rank.rank == 1
    out = torch.empty(4, 6)
    attempts = [
        attempt(comm.all_reduce, torch.ones(24) if odd else torch.ones(4, 6)),
        attempt(comm.all_reduce, torch.ones(4, 6), out=out if odd else None),
        attempt(comm.all_reduce, torch.ones(6, 4).t() if odd else torch.ones(4, 6)),
        attempt(comm.all_reduce, torch.ones(24), timeout_s=9.0 if odd else 10.0),
    ]
    work = comm.all_reduce(torch.ones(24), async_op=True) if odd else None
    attempts.append(attempt(work.wait) if work else attempt(comm.all_reduce, torch.ones(24)))
    return attempts


def test_what_is_a_ranks_own_business(pools: Pools) -> None:
    for row in pools(2).run(local_differences):
        assert [one.kind for one in row] == [""] * 5
