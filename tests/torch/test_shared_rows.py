# SPDX-License-Identifier: Apache-2.0
"""An all_to_all_single whose rows the ranks can't share equally: Gloo cuts its elements."""

from typing import Any

import torch
import torch.distributed as dist

from tests.support.backends import on_backend
from tests.support.harness import Pools, Rank, Setup, attempt


def exchange_one_row(rank: Rank) -> list[Any]:
    """Exchange a tensor of one row: as it is where Gloo serves, else as the error advises."""
    row = torch.arange(8.0).reshape(1, 8) + 100 * rank.rank
    got, seven = torch.empty(1, 8), torch.ones(1, 7)
    if dist.get_backend() == "gloo":
        if attempt(dist.all_to_all_single, got, row).kind:  # from torch 2.15 on
            dist.all_to_all_single(got.view(-1), row.view(-1))
        return [got]
    refused = attempt(dist.all_to_all_single, got, row)
    dist.all_to_all_single(got.view(-1), row.view(-1))
    return [got, refused, attempt(dist.all_to_all_single, torch.empty(1, 7), seven)]


def expect_advice(pool: Any) -> None:
    gloos = pool.run(on_backend, "gloo", exchange_one_row)
    for (right,), (got, even, odd) in zip(
        gloos, pool.run(on_backend, "fastcoll", exchange_one_row), strict=True
    ):
        assert got.tolist() == right.tolist()
        assert even.kind == odd.kind == "UsageError"
        assert "view(-1)" in even.text
        assert "input_split_sizes" in odd.text
        assert "view" not in odd.text


def test_the_error_tells_how(backend_pools: Pools) -> None:
    expect_advice(backend_pools(2))


def test_the_error_tells_how_over_nodes(fresh_pool: Any) -> None:
    expect_advice(fresh_pool(2, Setup(init=False, nodes="ab")))
