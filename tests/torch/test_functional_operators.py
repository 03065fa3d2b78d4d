# SPDX-License-Identifier: Apache-2.0
"""Functional operators that torch's compiler makes of others, on groups in Python and compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import BACKENDS, COMPILE_S, on_backend, same
from tests.support.harness import Pool, Rank, Setup

Pools = Callable[[int], Pool]
functional = torch.ops._c10d_functional


def gathered(rank: Rank) -> list[torch.Tensor]:
    """The operator that joined all_gathers become; then the input is a part of the output too."""
    group: Any = dist.group.WORLD
    name, size = group.group_name, rank.world_size
    mine, apart = torch.arange(3.0) + rank.rank, torch.zeros(3 * size)
    functional.all_gather_into_tensor_out(mine, size, name, out=apart)
    within = torch.arange(3.0 * size) * (rank.rank + 1)
    own = within[3 * rank.rank : 3 * rank.rank + 3]
    functional.all_gather_into_tensor_out(own, size, name, out=within)
    return [functional.wait_tensor(one).clone() for one in (apart, within)]


def exchanged(rank: Rank, group: Any = None) -> list[torch.Tensor]:
    """The operator that `batch_isend_irecv` becomes: to the next rank, and from the one before.

    Before 2.13 torch has none.
    """
    if not hasattr(functional, "batch_p2p_ops"):
        return []
    name = (group or dist.group.WORLD).group_name
    peers = [(rank.rank + step) % rank.world_size for step in (1, -1)]
    mine, got = torch.arange(5.0) + rank.rank, torch.zeros(5)
    tensors = functional.batch_p2p_ops(["isend", "irecv"], peers, [4, 4], [mine, got], name)
    return [functional.wait_tensor(one).clone() for one in tensors]


def called(rank: Rank) -> list[torch.Tensor]:
    return [*gathered(rank), *exchanged(rank), *exchanged(rank)]


def on_both(rank: Rank) -> list[torch.Tensor]:
    """Call them on this group, and on one of Gloo beside it."""
    ours = called(rank)
    beside: Any = dist.new_group(backend="gloo")
    mine, out = torch.arange(3.0) + rank.rank, torch.zeros(3 * rank.world_size)
    functional.all_gather_into_tensor_out(mine, rank.world_size, beside.group_name, out=out)
    return [*ours, functional.wait_tensor(out).clone(), *exchanged(rank, beside)]


def test_they_reach_the_group(backend_pools: Pools, bare_pools: Pools) -> None:
    """A group of Gloo beside goes on to have torch's own kernel."""
    ours = backend_pools(2).run(on_backend, "fastcoll", on_both, deadline_s=COMPILE_S)
    assert same(ours, bare_pools(2).run(on_backend, "gloo", on_both))


def of_one(rank: Rank) -> list[torch.Tensor]:
    """Lists of one tensor, of a size that is known: on rank 0 behind a call of Python's."""
    group: Any = dist.group.WORLD
    me, size, store = rank.rank, rank.world_size, dist.distributed_c10d._get_default_store()
    mine, whole = torch.arange(3.0) + me, torch.zeros(3 * size)
    dist.all_gather_into_tensor(whole, mine)
    dist.reduce_scatter_tensor(torch.zeros(3), whole)
    found = []
    for operator, *terms in (
        (functional.all_gather_into_tensor, mine, size),
        (functional.reduce_scatter_tensor, whole, "sum", size),
    ):
        event, strided = f"{operator} is behind", torch.ones(4, 2)[:, 0]
        if me:
            store.wait([event])
        work: Any = dist.all_reduce(strided, async_op=True)  # Python's, on both backends
        if me:
            work.wait()
        result = operator(*terms, group.group_name)
        if not me:
            store.set(event, "")
        found.append(functional.wait_tensor(result).clone())
    return found


def test_a_list_of_one_is_the_plain_call(backend_pools: Pools, bare_pools: Pools) -> None:
    """The compiled backend carries it out as such, if nothing is queued in Python."""
    ours = backend_pools(2).run(on_backend, "fastcoll", of_one, deadline_s=COMPILE_S)
    assert same(ours, bare_pools(2).run(on_backend, "gloo", of_one))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_they_reach_a_group_of_nodes(
    fresh_pool: Callable[..., Pool], bare_pools: Pools, backend: str
) -> None:
    setup = Setup(False, nodes="aab", env={"FASTCOLL_TORCH_BACKEND": backend})
    ours = fresh_pool(3, setup).run(on_backend, "fastcoll", called, deadline_s=COMPILE_S)
    assert same(ours, bare_pools(3).run(on_backend, "gloo", called))
