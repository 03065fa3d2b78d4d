# SPDX-License-Identifier: Apache-2.0
"""The names by which programs of torch.distributed begin, ask for their rank, and end."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.integrations import graph_names
from fastcoll.types import Op
from tests.support.fallbacks import noting
from tests.support.harness import Attempt, Pools, Rank, Setup, attempt
from tests.support.sites import Site, of_fastcoll

BARE = Setup(init=False)
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def in_launch(**env: str) -> Setup:
    """Ranks in whose environment a launcher has left something."""
    return Setup(init=False, env={"WORLD_SIZE": "4"} | env)


def begin_and_end(rank: Rank, end: str) -> list[Any]:
    """Begin by torch's name, ask, end, and call in vain; then once more."""
    found: list[Any] = []
    for turn, timeout in enumerate((9, timedelta(seconds=9))):
        fastcoll.init_process_group(
            "fastcoll" if turn else None,
            timeout=timeout,
            store=dist.PrefixStore(f"{end}{turn}", rank.store),
            rank=rank.rank,
            world_size=rank.world_size,
        )
        group = fastcoll.api.groups.default_group()
        assert (fastcoll.get_rank(), fastcoll.get_world_size()) == (rank.rank, rank.world_size)
        assert (fastcoll.get_rank(group), fastcoll.is_initialized()) == (rank.rank, True)
        tensor = torch.ones(3)
        fastcoll.all_reduce(tensor)
        found.append(tensor[0].item())
        if end == "with":
            with group:
                pass
        elif end == "its group":
            fastcoll.destroy_process_group(group)
        else:
            getattr(fastcoll, end)()
        assert not fastcoll.is_initialized()
        calls = (lambda: fastcoll.all_reduce(torch.ones(3)), fastcoll.get_rank, fastcoll.new_group)
        found += [attempt(call).text for call in calls]
    return found


@pytest.mark.parametrize("end", ["destroy", "destroy_process_group", "its group", "with"])
def test_after_the_end_a_call_is_an_error_until_the_next_init(
    fresh_pool: Callable[..., Any], end: str
) -> None:
    """In a launcher's environment, from which a call would make a default group else."""
    for row in fresh_pool(2, in_launch(RANK="0", **ADDRESS)).run(begin_and_end, end):
        for total, *texts in (row[:4], row[4:]):
            assert total == 2.0
            assert all("was closed" in text and "fastcoll.init()" in text for text in texts), texts


def in_a_new_world(rank: Rank) -> list[float]:
    """torch's next default group is another one: a call makes a group for it."""
    totals = []
    for turn in range(2):
        store = dist.PrefixStore(str(turn), rank.store)
        options: dict[str, Any] = {"rank": rank.rank, "world_size": rank.world_size}
        dist.init_process_group("gloo", store=store, **options)
        assert (fastcoll.get_rank(), fastcoll.is_initialized()) == (rank.rank, False)
        tensor = torch.ones(3)
        fastcoll.all_reduce(tensor)
        totals.append(tensor[0].item())
        fastcoll.destroy()
        assert "was closed" in attempt(fastcoll.all_reduce, tensor).text
        dist.destroy_process_group()
    return totals


def test_a_new_default_group_of_torch_is_a_new_beginning(fresh_pool: Callable[..., Any]) -> None:
    assert fresh_pool(2, BARE).run(in_a_new_world) == [[2.0, 2.0]] * 2


def ask_before_the_first_call(rank: Rank) -> list[Any]:
    return [fastcoll.get_rank(), fastcoll.get_world_size(), fastcoll.is_initialized()]


def test_the_launcher_tells_the_rank_before_there_is_a_group(
    fresh_pool: Callable[..., Any],
) -> None:
    pool = fresh_pool(1, in_launch(RANK="3", **ADDRESS))
    assert pool.run(ask_before_the_first_call) == [[3, 4, False]]


def ask_for_others(rank: Rank) -> list[Attempt]:
    found = [
        attempt(fastcoll.new_group, [0], backend="nccl"),
        attempt(fastcoll.new_group, timeout=3, timeout_s=3),
        attempt(rank.comm.new_group, timeout=timedelta(seconds=3), timeout_s=3),
        attempt(fastcoll.init_process_group, "gloo"),
        attempt(fastcoll.init_process_group, init_method="tcp://127.0.0.1:1"),
    ]
    fastcoll.barrier()
    return found


def test_another_backend_is_refused_with_the_way_out(pools: Pools) -> None:
    for backend, both, both_again, gloo, method in pools(2).run(ask_for_others):
        assert {one.kind for one in (backend, both, both_again, gloo, method)} == {"UsageError"}
        assert "backend='nccl'" in backend.text
        assert both.text == both_again.text == "give timeout or timeout_s, not both"
        assert "torch.distributed makes those of other backends" in gloo.text
        assert "start the program with torchrun" in method.text


def limits_of_groups(rank: Rank) -> list[float]:
    given: tuple[Any, ...] = (7, timedelta(seconds=7))
    groups = [fastcoll.new_group(timeout=one, backend="fastcoll") for one in given]
    groups += [rank.comm.new_group(timeout=one) for one in given]
    limits = [group._settings.timeout_s for group in groups]
    for group in groups:
        group.close()
    return limits


def test_a_new_group_takes_torchs_timeout(pools: Pools) -> None:
    assert pools(2).run(limits_of_groups) == [[7.0] * 4] * 2


def outside(rank: Rank) -> list[Any]:
    """A rank can do everything with a group that it is not in, and nothing happens."""
    comm, found = rank.comm, []
    for make in (fastcoll.new_group, comm.new_group):
        with warnings.catch_warnings(record=True) as caught, make([1]) as group:
            warnings.simplefilter("always")
            assert isinstance(group, fastcoll.Group)
            tensor = torch.ones(2)
            group.all_reduce(tensor)
            work = fastcoll.all_reduce(tensor, group=group, async_op=True)
            assert work.wait()
            sent = group.isend(tensor, 0)
            assert sent.wait()
            got: list[Any] = [None]
            group.all_gather_object(got, 5)
            made, sizes = fastcoll.all_to_all_single(None, tensor, None, [2], group=group)
        is_non_member = [group == other for other in (dist.GroupMember.NON_GROUP_MEMBER, -100)]
        found.append(
            (group.is_member, group.rank, group.world_size, got, made.numel(), sizes, is_non_member)
        )
        found.append((fastcoll.get_rank(group), len(caught)))
        if rank.rank == 0:
            assert sent.source_rank() == -1
            assert "no member" in repr(group)
            assert attempt(group.shrink).kind == "UsageError"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own
                dist.all_reduce(tensor, group=group)
    return found


def test_a_rank_outside_of_a_group_has_a_group_that_does_nothing(pools: Pools) -> None:
    zero, one = pools(2).run(outside)
    assert zero == [(False, -1, -1, [None], 0, [], [True, True]), (-1, 5)] * 2
    assert one == [(True, 0, 1, [5], 2, [2], [False, False]), (0, 0)] * 2


NAMES = ("sum", "product", "min", "max", "band", "bor", "bxor", "avg")


def test_the_operators_of_torch_know_the_names() -> None:
    assert [graph_names.code_of(name) for name in NAMES] == [Op[name.upper()] for name in NAMES]


def by_name(rank: Rank) -> list[Any]:
    """Each operation by its name and by torch's object; the second round needs no Python."""
    assert sorted(NAMES) == sorted(op.name.lower() for op in Op)
    comm, found = rank.comm, []
    for name in NAMES:
        start = torch.full((5,), rank.rank + 2.0 if name == "avg" else rank.rank + 2)
        one, two = start.clone(), start.clone()
        comm.all_reduce(one, getattr(fastcoll.ReduceOp, name.upper()))
        with noting() as passed:
            comm.all_reduce(two, name)
            comm.all_reduce(two.clone(), op=name)
        found.append((torch.equal(one, two), passed))
    for wrong in ("SUM", "add", "", 1):
        one = attempt(comm.all_reduce, torch.ones(2), wrong)
        found.append((one.kind == "UsageError", [word for word in NAMES if word not in one.text]))
    return found


@of_fastcoll
def test_operations_have_names(site: Site) -> None:
    for row in site.run(by_name):
        passed = [name for (_, calls), name in zip(row, NAMES, strict=False) if calls]
        assert all(right for right, _ in row), row
        assert site.nodes or passed == [], "a known call of one node needs no Python"
        assert [missing for _, missing in row[len(NAMES) :]] == [[]] * 4
