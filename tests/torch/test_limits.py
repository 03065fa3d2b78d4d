# SPDX-License-Identifier: Apache-2.0
"""Every way in which torch.distributed lets a program set a limit, on both backends."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from tests.support.backends import on_backend
from tests.support.harness import DEADLINE_S, LATE_S, Attempt, Pool, Rank, attempt

Pools = Callable[[int], Pool]
LIMIT = timedelta(seconds=1)
LONG = timedelta(seconds=DEADLINE_S)


def set_by_torch(group: Any) -> None:
    dist.distributed_c10d._set_pg_timeout(LIMIT, group)


# How the limit of a group that exists is set.
SETTERS: dict[str, Callable[[Any], None]] = {
    "_set_pg_timeout": set_by_torch,
    "set_timeout": lambda group: group.set_timeout(LIMIT),
    "of the backend": lambda group: group._get_backend(torch.device("cpu"))._set_default_timeout(
        LIMIT
    ),
    "of the communicator": lambda group: fastcoll.init(group).set_timeout(LIMIT),
}


def options(tensor: torch.Tensor, group: Any) -> None:
    opts = dist.AllreduceOptions()
    opts.timeout, opts.asyncOp = LIMIT, False
    group.allreduce([tensor], opts)


# Which call then has it.
CALLS: dict[str, Callable[[torch.Tensor, Any], object]] = {
    "known": lambda tensor, group: dist.all_reduce(tensor, group=group),
    "new": lambda tensor, group: dist.all_reduce(tensor.bfloat16(), group=group),
    "asynchronous": lambda tensor, group: dist.all_reduce(
        tensor, group=group, async_op=True
    ).wait(),  # type: ignore[union-attr]
    "of fastcoll": lambda tensor, group: fastcoll.all_reduce(tensor, group=group),
    "recv": lambda tensor, group: dist.recv(tensor, 1, group),
    "monitored": lambda _, group: dist.monitored_barrier(group),
}
PAIRS = [
    *[(setter, "known") for setter in SETTERS],
    *[("_set_pg_timeout", call) for call in CALLS if call != "known"],
]


def late(rank: Rank, setter: str, call: str, backend: str = "fastcoll") -> Attempt | None:
    """Rank 1 stays away from a group whose limit was made short after its first calls."""
    group, tensor = dist.new_group(timeout=LONG, backend=backend), torch.ones(2)
    for _ in range(2):
        fastcoll.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group)
    event = f"{setter} {call} {backend}"
    if rank.rank == 1:
        rank.wait_for(event)
        return None
    with warnings.catch_warnings():
        if backend == "fastcoll":
            warnings.simplefilter("error")  # torch's own function says that it does not do it
        SETTERS[setter](group)
    found = attempt(CALLS[call], tensor, group)
    rank.tell(event)
    return found


def check(found: Attempt) -> None:
    assert found.kind == "CollectiveTimeout", found
    assert LIMIT.total_seconds() / 2 < found.seconds < LATE_S, found


@pytest.mark.parametrize(("setter", "call"), PAIRS)
def test_a_new_limit_of_a_group(backend_pools: Pools, setter: str, call: str) -> None:
    check(backend_pools(2).run(on_backend, "fastcoll", late, setter, call)[0])


def test_a_new_limit_of_a_group_of_gloo(bare_pools: Pools) -> None:
    """Which a Communicator stands for since its first call of fastcoll's."""
    check(bare_pools(2).run(on_backend, "gloo", late, "_set_pg_timeout", "of fastcoll", "gloo")[0])


def given(rank: Rank, way: str) -> Attempt | None:
    """Rank 1 stays away from a call that is given its limit, or whose group was."""
    group = dist.new_group(timeout=LIMIT if way == "new_group" else LONG)
    if rank.rank == 1:
        rank.wait_for(way)
        return None
    calls: dict[str, Callable[[], object]] = {
        "new_group": lambda: dist.all_reduce(torch.ones(2), group=group),
        "options": lambda: options(torch.ones(2), group),
        "barrier": lambda: group.barrier(timeout=LIMIT).wait(),  # type: ignore[union-attr]
        "wait": lambda: dist.all_reduce(torch.ones(2), group=group, async_op=True).wait(LIMIT),  # type: ignore[union-attr]
    }
    found = attempt(calls[way])
    rank.tell(way)
    return found


@pytest.mark.parametrize("way", ["new_group", "options", "barrier", "wait"])
def test_a_limit_that_is_given(backend_pools: Pools, way: str) -> None:
    check(backend_pools(2).run(on_backend, "fastcoll", given, way)[0])


def told_limits(rank: Rank) -> list[Any]:
    group: Any = dist.new_group([rank.rank], timeout=LONG, use_local_synchronization=True)
    backend = group._get_backend(torch.device("cpu"))
    first = backend.options
    backend.set_timeout(LIMIT)
    ranks = list(first.global_ranks_in_group)
    is_named = first.group_name == group.group_name
    return [first._timeout, backend.options._timeout, ranks, is_named, first.backend]


def test_a_group_tells_its_limit(backend_pools: Pools) -> None:
    rows = backend_pools(2).run(on_backend, "fastcoll", told_limits)
    assert rows == [[LONG, LIMIT, [me], True, "fastcoll"] for me in range(2)]


def senseless(rank: Rank) -> list[str]:
    group = dist.new_group()
    seen = [attempt(group.set_timeout, timedelta(seconds=0)).kind]  # type: ignore[union-attr]
    dist.all_reduce(torch.ones(2), group=group)
    seen.append(attempt(dist.distributed_c10d._set_pg_timeout, LIMIT, "no group").kind)
    return seen


def test_a_senseless_limit_is_refused(backend_pools: Pools) -> None:
    for seen in backend_pools(2).run(on_backend, "fastcoll", senseless):
        assert seen[0] == "UsageError"
        assert seen[1] != ""


def monitored(rank: Rank) -> dict[str, list[str]]:
    """Both ranks call, so only a limit that is refused can end the call with an error."""
    del rank
    dist.new_group(timeout=timedelta.max)  # overflows in torch
    group: Any = dist.new_group(timeout=LONG)
    limits = {"-1 s": -1.0, "-1 ms": -1e-3, "-0.4 ms": -4e-4, "0": 0.0}
    kinds = {
        text: [
            attempt(dist.monitored_barrier, group, given).kind
            for given in (limit, timedelta(seconds=limit))
        ]
        for text, limit in limits.items()
    }
    kinds["of the group"] = [attempt(group.monitored_barrier, timedelta(seconds=-1)).kind]
    dist.monitored_barrier(group, timedelta.max)
    return kinds


def test_odd_limits_of_a_monitored_barrier(backend_pools: Pools) -> None:
    """A negative one meant no limit to a compiled group, and timedelta.max made no group."""
    refused = dict.fromkeys(["-1 s", "-1 ms", "-0.4 ms"], ["UsageError"] * 2)
    expected = {**refused, "0": ["CollectiveTimeout"] * 2, "of the group": ["UsageError"]}
    assert backend_pools(2).run(on_backend, "fastcoll", monitored) == [expected] * 2


def too_short(rank: Rank) -> str | None:
    """Rank 1 stays away from a call whose limit is less than a millisecond."""
    group: Any = dist.new_group(timeout=LONG)
    found = None
    if rank.rank == 0:
        found = attempt(dist.monitored_barrier, group, timedelta(microseconds=900)).text
        rank.tell("too short")
    rank.wait_for("too short")
    return found


def test_a_limit_below_a_millisecond_waits(backend_pools: Pools) -> None:
    """C++ cut it to 0, and the error named no rank."""
    found = backend_pools(2).run(on_backend, "fastcoll", too_short)[0]
    assert "Rank 1 failed to pass monitoredBarrier in 1 ms" in found
