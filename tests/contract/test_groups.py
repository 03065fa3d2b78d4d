# SPDX-License-Identifier: Apache-2.0
"""Groups beside the default one: subgroups, and their ends in any order.

Process groups of torch stand in torch/test_process_groups.py.
"""

import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from tests.support.harness import Attempt, Pools, Rank, attempt
from tests.support.held import list_held


def sums(rank: Rank, groups: list[list[int]]) -> list[Any]:
    """Make groups and sum the default ranks of their members in each; None where not a member."""
    results: list[Any] = []
    for ranks in groups:
        group = fastcoll.new_group(ranks)
        theirs = group if rank.rank in ranks else dist.GroupMember.NON_GROUP_MEMBER
        tensor = torch.full((5,), float(rank.rank))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fastcoll.all_reduce(tensor, group=group)
            fastcoll.reduce(tensor, 0, dist.ReduceOp.MAX, theirs)  # of equal tensors
        if rank.rank in ranks:
            assert isinstance(group, fastcoll.Communicator)
            assert (group.rank, group.world_size) == (sorted(ranks).index(rank.rank), len(ranks))
            results.append(tensor[0].item())
            group.close()
        else:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            assert tensor.tolist() == [rank.rank] * 5
            assert all("not in the group" in str(one.message) for one in caught)
            assert [one.filename for one in caught] == [__file__] * 2
            assert group.stats() == {}
            with pytest.raises(fastcoll.UsageError, match="not in the group"):
                _ = group.timeout_s
            results.append(None)
    return results


def test_subgroups(pools: Pools) -> None:
    groups = [[0, 1], [1, 2, 3], [0, 2], [3], [0, 1, 2, 3], [3, 1]]
    results = pools(4).run(sums, groups)
    for rank, row in enumerate(results):
        assert row == [float(sum(ranks)) if rank in ranks else None for ranks in groups]


def more_held_by_a_group(rank: Rank) -> list[str]:
    before, _ = list_held()
    group = rank.comm.new_group()
    group.all_reduce(torch.ones(3))
    after, _ = list_held()
    group.close()
    assert list_held()[0] == before
    return list((Counter(after) - Counter(before)).elements())


def test_a_further_group_has_a_connection_to_each_peer_and_its_own_memory(pools: Pools) -> None:
    """Groups share all else, as a process may open few files: often 1024."""
    assert pools(4).run(more_held_by_a_group) == [["/memfd", "socket", "socket", "socket"]] * 4


def close_in_any_order(rank: Rank, count: int) -> list[float]:
    """Groups over the same ranks, closed in another order on each rank, used in between."""
    groups = [rank.comm.new_group() for _ in range(count)]
    values = []
    for round_number in range(2):
        for number, group in enumerate(groups):
            tensor = torch.full((300,), float(number + round_number))
            group.all_reduce(tensor)
            values.append(tensor[7].item())
    order = list(range(count))
    random.Random(rank.rank).shuffle(order)
    for number in order:
        groups[number].close()
        groups[number].close()  # closing twice does nothing
    return values


def test_groups_are_closed_in_any_order(pools: Pools) -> None:
    wanted = [3.0 * (number + late) for late in range(2) for number in range(9)]
    assert pools(3).run(close_in_any_order, 9) == [wanted] * 3


def nested(rank: Rank) -> list[float]:
    """A group made from a group, which it outlives."""
    outer = rank.comm.new_group([1, 2, 3])
    if not outer.is_member:
        return []
    inner = outer.new_group([0, 2])
    outer.close()
    if not inner.is_member:
        return []
    tensor = torch.tensor([float(rank.rank)])
    inner.all_reduce(tensor)
    inner.broadcast(tensor, 1)
    inner.close()
    return tensor.tolist()


def test_a_group_outlives_the_one_it_was_made_from(pools: Pools) -> None:
    assert pools(4).run(nested) == [[], [4.0], [], [4.0]]


def misuse(rank: Rank) -> dict[str, Attempt]:
    """Every one of these is a mistake that this rank can see by itself, or that all ranks see."""
    differing = [0, 1] if rank.rank else [0, 2]
    group = rank.comm.new_group()
    group.close()
    tensor = torch.ones(2)
    attempts = {
        "differing": attempt(fastcoll.new_group, differing),
        "closed": attempt(fastcoll.all_reduce, tensor, group=group),
        "closed method": attempt(group.barrier),
    }
    assert tensor.tolist() == [1.0, 1.0]
    fastcoll.all_reduce(tensor)
    assert tensor.tolist() == [3.0, 3.0]
    return attempts


def test_mistakes_are_named_and_do_no_harm(pools: Pools) -> None:
    words = {
        "differing": "new_group",
        "closed": "destroyed",
        "closed method": "destroyed",
    }
    for attempts in pools(3).run(misuse):
        for name, word in words.items():
            one = attempts[name]
            assert one.kind == ("DesyncError" if name == "differing" else "UsageError"), one
            assert word in one.text


def fast_group(rank: Rank) -> list[Any]:
    """A group's numerics holds where a call does not say otherwise."""
    fast = rank.comm.new_group(numerics="fast", timeout_s=10)
    tensor = torch.ones(9)
    fast.all_reduce(tensor, algorithm="ring")
    exact = attempt(fast.all_reduce, tensor, algorithm="ring", numerics="same_bits")
    fast.all_reduce(tensor, numerics="same_bits")
    fast.all_reduce(tensor)
    inner = fast.new_group()
    inner.all_reduce(tensor, algorithm="ring")
    usual = attempt(rank.comm.all_reduce, tensor, algorithm="ring")
    inner.close()
    fast.close()
    return [tensor[8].item(), exact.kind, usual.kind]


def test_numerics_of_a_group(pools: Pools) -> None:
    wanted = [81.0, "UnsupportedError", "UnsupportedError"]
    assert pools(3).run(fast_group) == [wanted] * 3


def wait_for_ages(rank: Rank) -> list[float]:
    """Limits that no clock, socket or store can be told."""
    values = []
    for limit_s in (1e7, 1e12, 1e300):
        with rank.comm.new_group(timeout_s=limit_s) as group:
            tensor = torch.ones(100_000)
            group.all_reduce(tensor)
            group.all_reduce(tensor, timeout_s=limit_s)
            values.append(tensor[-1].item())
    return values


def test_limits_as_good_as_none(pools: Pools) -> None:
    assert pools(2).run(wait_for_ages) == [[4.0] * 3] * 2
