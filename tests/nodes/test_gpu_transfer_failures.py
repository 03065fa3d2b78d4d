# SPDX-License-Identifier: Apache-2.0
"""Failures of sends and receives of CUDA tensors over several nodes, on made-up GPUs."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastcoll.nodes.transfers.channels import Channel
from fastcoll.nodes.transfers.payloads import GpuPayload
from tests.support.fake_streams import slow_node_gpus
from tests.support.gpu import needs_gpu_part
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt

pytestmark = needs_gpu_part
FreshPool = Callable[..., Pool]
LIMIT_S = 2.0


def differ(rank: Rank, peer: int, what: str, plant: Callable[[], Any] | None) -> Attempt:
    """Rank 0 sends 40000 floats, `peer` expects something else."""
    comm = rank.hasty_group(LIMIT_S)
    with slow_node_gpus(comm):
        if plant is not None:
            plant()
        if rank.rank == 0:
            return attempt(
                comm.send, torch.ones(40_000), peer
            )  # fewer bytes wait for nobody on a node
        if rank.rank == peer:
            other = torch.ones(50_000) if what == "size" else torch.ones(40_000, dtype=torch.int32)
            return attempt(comm.recv, other, 0)
    time.sleep(0.3)
    return attempt(comm.barrier)


@pytest.mark.parametrize("what", ["size", "dtype"])
@pytest.mark.parametrize("peer", [1, 2])
def test_messages_that_do_not_fit_are_seen(fresh_pool: FreshPool, peer: int, what: str) -> None:
    found = fresh_pool(3, Setup(nodes="aab")).run(differ, peer, what, None)
    assert {one.kind for one in found} == {"DesyncError"}, found
    other = "50000" if what == "size" else "int32"
    assert all("float32" in one.text and other in one.text for one in found), found


def compares_nothing() -> None:
    """Heads are taken as they come."""
    Channel._compare = lambda self, expected, found: None  # type: ignore[method-assign]


def test_a_message_that_nobody_compares_fails_the_test(fresh_pool: FreshPool) -> None:
    """Negative control."""
    outcomes = fresh_pool(3, Setup(nodes="aab")).outcomes(differ, 2, "dtype", compares_nothing)
    assert {one.value.kind if one.value else "" for one in outcomes} != {"DesyncError"}


def never_comes(
    rank: Rank, peer: int, stuck: bool, plant: Callable[[], Any] | None = None
) -> Attempt:
    """Rank 0 does not send; or it does, but its stream never gets so far."""
    comm = rank.hasty_group(LIMIT_S)
    with slow_node_gpus(comm) as slow:
        if plant is not None:
            plant()
        if rank.rank == peer:
            found = attempt(comm.recv, torch.ones(400), 0)
            rank.tell(f"{comm.name} over")
            return found
        if rank.rank == 0 and stuck:
            slow.main.is_stuck = True
            slow.main.give(lambda: None)
            return attempt(comm.send, torch.ones(400), peer)
    rank.wait_for(f"{comm.name} over")
    return attempt(comm.barrier)


@pytest.mark.parametrize("stuck", [False, True])
@pytest.mark.parametrize("peer", [1, 2])
def test_a_sender_that_is_late_is_named(fresh_pool: FreshPool, peer: int, stuck: bool) -> None:
    found = fresh_pool(3, Setup(nodes="aab")).run(never_comes, peer, stuck)
    assert {one.kind for one in found} == {"CollectiveTimeout"}, found
    assert {one.ranks for one in found} == {(0,)}, found
    assert found[peer].seconds < LIMIT_S + LATE_S


def ignores_the_stream() -> None:
    """A send does not wait for its stream."""
    GpuPayload._await_stream = lambda self, wait: None  # type: ignore[method-assign]


def test_a_stuck_stream_that_nobody_waits_for_fails_the_test(fresh_pool: FreshPool) -> None:
    """Negative control."""
    outcomes = fresh_pool(3, Setup(nodes="aab")).outcomes(never_comes, 2, True, ignores_the_stream)
    assert {one.value.ranks if one.value else None for one in outcomes} != {(0,)}
