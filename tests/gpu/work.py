# SPDX-License-Identifier: Apache-2.0
"""Calls that several tests for GPUs share: exact calls, parts of any size, and numbers to add.

The promises and the oracle are those of tests/contract.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks
from tests.contract.test_gpu_parts import go_through
from tests.support import perform
from tests.support.calls import Call, Place
from tests.support.gpu import ThreadPool, as_gpu_rank
from tests.support.harness import Pool, Rank
from tests.support.perform import Result
from tests.support.sites import GPU, on_gpu, perform_on_gpu, ranks_by_node

START_S = 120.0  # processes come to one GPU one after another


def on_device(verb: str, dtype: str, numel: int, *, in_place: bool = False, **fields: Any) -> Call:
    """A call with tensors on each rank's GPU."""
    return Call(verb, dtype, numel, places=(Place("device", in_place=in_place),), **fields)


def check(ranks: GpuRanks, calls: Iterable[Call]) -> None:
    """Make calls on rank threads and compare with the oracle."""
    replace(GPU, world=ranks.world_size).on(ThreadPool(ranks)).check(calls, batch=50)


def perform_in_process(rank: Rank, calls: Sequence[Call]) -> list[Result]:
    """Make calls on the GPU of a rank that is a process."""
    return perform_on_gpu(as_gpu_rank(rank), calls)


def come_to_gpu(rank: Rank) -> None:
    torch.zeros(1, device=as_gpu_rank(rank).device)


def check_processes(pool: Pool, calls: Iterable[Call], nodes: str = "") -> None:
    """As `check`, of ranks that are processes; `nodes`: the node of each rank, a letter each."""
    pool.run(come_to_gpu, deadline_s=START_S)
    perform.check(pool, calls, 200, ranks_by_node(nodes), perform=perform_in_process)


def exchange(me: GpuRank, kinds: list[tuple[int, str]], *steps: Callable[..., Any]) -> list[str]:
    """Exchange parts and messages of some sizes and types; what came wrong."""
    return [text for one in steps for text in on_gpu(me, go_through, one, kinds)]


def exchange_in_process(
    rank: Rank, kinds: list[tuple[int, str]], *steps: Callable[..., Any]
) -> tuple[list[str], str]:
    """As `exchange`, of a rank that is a process; its report, too."""
    return exchange(as_gpu_rank(rank), kinds, *steps), rank.comm.gpu_report()


def numbers(seed: int, numel: int) -> torch.Tensor:
    """Numbers on the CPU whose sum depends on the order."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)
