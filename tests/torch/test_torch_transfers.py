# SPDX-License-Identifier: Apache-2.0
"""Sends and receives through torch.distributed, on both kinds of its backend "fastcoll"."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastcoll.integrations.torch_group import FastcollProcessGroup
from tests.support import transfers
from tests.support.backends import COMPILE_S, on_backend, same
from tests.support.harness import LATE_S, Pool, Rank, attempt

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_of_a_group_as_on_gloo(backend_pools: Pools, world: int) -> None:
    ours = backend_pools(world).run(on_backend, "fastcoll", transfers.any_source)
    assert same(ours, backend_pools(world).run(on_backend, "gloo", transfers.any_source))


@pytest.mark.parametrize("name", ["wrong_by_itself", "other_types", "left_open", "nobody_sends"])
def test_errors_keep_their_type(backend_pools: Pools, name: str) -> None:
    rows = backend_pools(2).run(on_backend, "fastcoll", getattr(transfers, name))
    transfers.check_errors(name, rows)


def goes_on_after(rank: Rank) -> list[float]:
    """A batch of transfers, then a list of calls, in each of which something raises."""
    peer, sums = 1 - rank.rank, []
    tensor = torch.ones(4)
    ops = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.isend, tensor, peer, tag=-1)]
    assert attempt(dist.batch_isend_irecv, ops).kind
    dist.recv(torch.zeros(4), peer)
    for _ in range(2):
        dist.all_reduce(total := torch.full((4,), rank.rank + 1.0))
        sums.append(total.sum().item())
        with contextlib.suppress(ZeroDivisionError), dist._coalescing_manager():
            dist.all_reduce(torch.ones(4))
            raise ZeroDivisionError
    return sums


def test_calls_after_a_batch_that_failed(backend_pools: Pools) -> None:
    assert backend_pools(2).run(on_backend, "fastcoll", goes_on_after) == [[12.0, 12.0]] * 2


# ---- the compiled backend alone ------------------------------------------------------------------


def without_python(rank: Rank) -> list[Any]:
    """Transfers where Python's part of the backend would fail, and one that needs it."""

    def fails(*_: object) -> None:
        raise AssertionError("went through Python")

    peer, taken = 1 - rank.rank, torch.zeros(4)
    names = ("send", "recv", "recv_anysource", "_start_coalescing", "_end_coalescing")
    kept = {name: getattr(FastcollProcessGroup, name) for name in names}
    for name in names:
        setattr(FastcollProcessGroup, name, fails)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            work = dist.isend(torch.ones(4), peer)
            assert dist.recv(taken) == peer
            ops = [
                dist.P2POp(dist.isend, taken + 1, peer),
                dist.P2POp(dist.irecv, taken, peer),
            ]
            for batch in dist.batch_isend_irecv(ops):
                batch.wait()
            assert work is not None
            work.wait()
        strided = attempt(dist.isend, torch.ones(4, 2)[:, 0], peer)
    finally:
        for name, method in kept.items():
            setattr(FastcollProcessGroup, name, method)
    events = {event.name for event in trace.events() if event.name.startswith("fastcoll:")}
    return [taken.tolist(), events, strided.text]


@pytest.mark.native
@pytest.mark.timeout(2 * COMPILE_S)
def test_what_is_plain_goes_past_python(compiled_pools: Pools) -> None:
    for taken, events, strided in compiled_pools(2).run(on_backend, "fastcoll", without_python):
        assert taken == [2.0] * 4
        assert events == {"fastcoll:send", "fastcoll:recv", "fastcoll:coalesced"}
        assert strided == "went through Python"


def batch_fails(rank: Rank) -> list[Any]:
    """torch does not end a batch in which a call raises: what comes later is no part of it."""
    peer, group, cpu = 1 - rank.rank, dist.group.WORLD, torch.device("cpu")
    assert group is not None
    tensor, total = torch.ones(4), torch.full((4,), float(rank.rank))
    wrong = dist.P2POp(dist.isend, tensor, peer, tag=-1)
    seen = attempt(dist.batch_isend_irecv, [dist.P2POp(dist.isend, tensor, peer), wrong])
    assert seen.kind == "UsageError", seen
    assert seen.seconds < LATE_S
    dist.recv(tensor, peer)
    dist.broadcast(total, 0)
    return [total.tolist(), group._end_coalescing(cpu).result()]


@pytest.mark.native
@pytest.mark.timeout(2 * COMPILE_S)
def test_a_batch_that_fails_is_over(compiled_pools: Pools) -> None:
    rows = compiled_pools(2).run(on_backend, "fastcoll", batch_fails)
    assert rows == [[[0.0] * 4, []]] * 2
