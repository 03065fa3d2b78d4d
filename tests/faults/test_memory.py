# SPDX-License-Identifier: Apache-2.0
"""Ranks that have no memory for what a group, call or transfer needs beside the tensors."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore

import fastcoll
from fastcoll.api import making
from fastcoll.bootstrap import join, rendezvous, single_copy
from fastcoll.bootstrap.blocking_calls import ask
from fastcoll.group import communicator
from fastcoll.group.communicator import Communicator
from fastcoll.native import _C
from tests.faults.test_resources import LIMIT_S, SOON_S, little_memory, make
from tests.support.backends import COMPILE_S, TorchGroup, on_torch
from tests.support.harness import Attempt, Pool, Rank, Setup, attempt

NUMEL = 1 << 26  # of which no byte is touched


def strided_without_memory(rank: Rank, what: str) -> list[Attempt]:
    """Rank 1 has no memory for the copy that travels in place of a strided tensor.

    Returns:
        The errors of the call or transfer, and of the next call.
    """
    group, sends = rank.comm, rank.rank == 1
    if not isinstance(group, TorchGroup):
        group = group.new_group(timeout_s=3 * LIMIT_S)
    tensor = torch.ones(1).expand(NUMEL) if what == "sent" else torch.empty(2 * NUMEL)[::2]
    if rank.rank != 1:
        tensor = torch.empty(NUMEL)
    if what == "received":
        sends = not sends
    start = partial(group.isend if sends else group.irecv, tensor, 1 - rank.rank)
    if what == "reduced":
        start = partial(group.all_reduce, tensor, async_op=True)
    elif rank.rank == 2:
        start = partial(group.barrier, async_op=True)
    with little_memory(2) if rank.rank == 1 else nullcontext():
        return [attempt(lambda: start().wait()), attempt(group.barrier)]


def check_who_had_no_memory(found: list[list[Attempt]]) -> None:
    own = found[1][0]
    assert own.kind == "RuntimeError" and "allocate memory" in own.text, own
    for one in (one for rows in found for one in rows if one is not own):
        assert (one.kind, one.ranks) == ("PeerLostError", (1,)), one
        assert "rank 1 gave " in one.text and "allocate memory" in one.text, one
        assert one.seconds < SOON_S, one


@pytest.mark.parametrize("nodes", ["", "ab", "aab"])
@pytest.mark.parametrize("what", ["sent", "received", "reduced"])
def test_a_strided_tensor_without_memory(
    fresh_pool: Callable[..., Pool], nodes: str, what: str
) -> None:
    pool = fresh_pool(len(nodes) or 2, Setup(nodes=nodes))
    check_who_had_no_memory(pool.run(strided_without_memory, what))


def parts_without_memory(rank: Rank) -> list[Attempt]:
    """Rank 1 has no memory for the copies of strided parts; the call is a known one."""
    group = rank.comm.new_group(timeout_s=3 * LIMIT_S)
    part = torch.ones(1 << 24)
    group.all_gather([torch.empty_like(part) for _ in range(2)], part)
    parts = list(torch.empty(1 << 24, 2).unbind(1))
    with little_memory(2) if rank.rank == 1 else nullcontext():
        return [attempt(group.all_gather, parts, part), attempt(group.barrier)]


def test_strided_parts_without_memory(fresh_pool: Callable[..., Pool]) -> None:
    check_who_had_no_memory(fresh_pool(2).run(parts_without_memory))


COMPILED = [pytest.mark.native, pytest.mark.timeout(2 * COMPILE_S)]


@pytest.mark.parametrize("pools", ["bare_pools", pytest.param("compiled_pools", marks=COMPILED)])
@pytest.mark.parametrize("what", ["sent", "received", "reduced"])
def test_a_strided_tensor_of_torchs_without_memory(
    request: pytest.FixtureRequest, pools: str, what: str
) -> None:
    pool = request.getfixturevalue(pools)(2)
    check_who_had_no_memory(pool.run(on_torch, strided_without_memory, what))


def quantised_without_memory(rank: Rank) -> list[Attempt]:
    """Rank 1 has no memory for the sums that a known call quantises."""
    group = rank.comm.new_group(timeout_s=3 * LIMIT_S)
    rows = torch.ones(1 << 14, 1 << 11)
    codes, scales = torch.empty(rows.shape, dtype=torch.int8), torch.empty(rows.shape[0])
    group.all_reduce(rows)  # of which the plan is known from here on
    with little_memory(2) if rank.rank == 1 else nullcontext():
        call = partial(group.all_reduce, rows, out=codes, then=fastcoll.RMSNorm(scales=scales))
        return [attempt(call), attempt(group.barrier)]


def test_a_known_call_without_memory(fresh_pool: Callable[..., Pool]) -> None:
    for one in (one for rows in fresh_pool(2).run(quantised_without_memory) for one in rows):
        assert one.kind == "DriverError" and "rank 1 has no memory" in one.text, one
        assert one.seconds < SOON_S, one


def batch_without_memory(rank: Rank) -> list[Attempt]:
    """C++ has no memory for the items of a batch, of which the last is none."""
    ops: list[Any] = [fastcoll.P2POp("isend", torch.ones(3), 1 - rank.rank)] * 600_000
    with little_memory(0):
        attempts = [attempt(fastcoll.batch_isend_irecv, [*ops, None])]
    return [*attempts, attempt(fastcoll.barrier)]


def test_a_batch_without_memory_is_an_error(fresh_pool: Callable[..., Pool]) -> None:
    for refused, then in fresh_pool(2).run(batch_without_memory):
        assert (refused.kind, then.kind) == ("MemoryError", ""), (refused, then)


# Of Python's own: whether there is memory for an object is chance where a limit is near.
WITHOUT_MEMORY = {
    "introduction": (join, "describe_rank"),
    "connection": (rendezvous, "_call"),
    "region": (making, "create_region"),
    "single copies": (single_copy, "agree"),
    "planner": (communicator, "Planner"),
}


def find_no_memory(rank: Rank, what: str) -> Attempt:
    """Rank 1 finds none once, and has some again."""
    where, name = WITHOUT_MEMORY[what]
    effects = itertools.chain([MemoryError], itertools.repeat(mock.DEFAULT))
    patch = mock.patch.object(where, name, wraps=getattr(where, name), side_effect=effects)
    with patch if rank.rank == 1 else nullcontext():
        return attempt(make, "init", rank, rank.comm, 0)


@pytest.mark.parametrize("what", WITHOUT_MEMORY)
def test_a_rank_whose_python_finds_no_memory_says_so_to_all(
    fresh_pool: Callable[..., Pool], what: str
) -> None:
    found = fresh_pool(3).run(find_no_memory, what)
    for one in found:
        assert one.kind == "DriverError" and "Cannot allocate memory" in one.text, one
        assert one.seconds < SOON_S, one
    assert all("rank 1" in one.text for one in found[::2]), found


def test_a_group_that_finds_no_memory_in_c_raises_a_driver_error() -> None:
    with mock.patch.object(_C.Group, "__init__", side_effect=MemoryError):
        one = attempt(Communicator.from_store, HashStore(), 0, 1)
    assert one.kind == "DriverError" and "Cannot allocate memory" in one.text, one


def test_a_question_without_memory_for_its_thread_is_asked() -> None:
    with mock.patch("threading.Thread.start", side_effect=MemoryError):
        assert ask(lambda: "an answer", 1.0) == "an answer"
