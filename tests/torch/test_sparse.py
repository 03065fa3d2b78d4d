# SPDX-License-Identifier: Apache-2.0
"""Sums of sparse tensors that go on while the program does something else, as on Gloo."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import on_backend
from tests.support.harness import Pool, Pools, Rank, Setup

SUMMED = [3.0, 0.0, 4.0, 0.0]


def sparse_of(rank: Rank) -> torch.Tensor:
    """The ranks have 1 and 2 in the first place, and the last one 4 in the third."""
    places, values = ([[0, 0]], [0.5, 0.5]) if rank.rank == 0 else ([[0, 2]], [2.0, 4.0])
    return torch.sparse_coo_tensor(torch.tensor(places), torch.tensor(values), (4,))


def sums_behind_a_message(rank: Rank, mode: str) -> list[Any]:
    """Rank 1 comes to its sum once it has a message that rank 0 sends behind the sum's start."""
    how = torch.inference_mode if mode == "inference" else contextlib.nullcontext
    facts: list[Any] = []
    with how():
        tensor, dense = sparse_of(rank), torch.ones(3)
        if rank.rank == 1:
            dist.recv(torch.empty(1), 0)
        work = dist.all_reduce(tensor, async_op=True)
        behind = dist.all_reduce(dense, async_op=True)
        assert work is not None
        assert behind is not None
        if rank.rank == 0:
            dist.send(torch.ones(1), 1)
        behind.wait()
        facts += [work.is_completed(), work.wait(), tensor.to_dense().tolist(), dense.tolist()]
        [of_future], [of_work] = work.get_future().wait(), work.result()
        facts += [one.to_dense().tolist() for one in (of_future, of_work)]
        dist.all_reduce(again := sparse_of(rank))
        facts.append(again.to_dense().tolist())
    return facts


EXPECTED = [True, True, SUMMED, [2.0] * 3, SUMMED, SUMMED, SUMMED]


@pytest.mark.parametrize("mode", ["usual", "inference"])
def test_a_sum_goes_on_beside_the_program(backend_pools: Pools, mode: str) -> None:
    rows = backend_pools(2).run(on_backend, "fastcoll", sums_behind_a_message, mode)
    assert rows == [EXPECTED] * 2


def test_a_sum_over_nodes_goes_on_too(fresh_pool: Callable[[int, Setup], Pool]) -> None:
    pool = fresh_pool(2, Setup(init=False, nodes="ab"))
    rows = pool.run(on_backend, "fastcoll", sums_behind_a_message, "usual")
    assert rows == [EXPECTED] * 2
