# SPDX-License-Identifier: Apache-2.0
"""Ranks that have no memory for what a call or transfer needs beside the tensors."""

from collections.abc import Callable
from typing import Any

import torch

import fastcoll
from tests.faults.test_resources import little_memory
from tests.support.harness import Attempt, Pool, Rank, attempt


def batch_without_memory(rank: Rank) -> list[Attempt]:
    """C++ has no memory for the items of a batch, of which the last is none."""
    ops: list[Any] = [fastcoll.P2POp("isend", torch.ones(3), 1 - rank.rank)] * 600_000
    with little_memory(0):
        attempts = [attempt(fastcoll.batch_isend_irecv, [*ops, None])]
    return [*attempts, attempt(fastcoll.barrier)]


def test_a_batch_without_memory_is_an_error(fresh_pool: Callable[..., Pool]) -> None:
    for refused, then in fresh_pool(2).run(batch_without_memory):
        assert (refused.kind, then.kind) == ("MemoryError", ""), (refused, then)
