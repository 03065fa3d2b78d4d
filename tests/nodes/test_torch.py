# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's programs on the backend "fastcoll", unchanged, over two nodes."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.contract.test_concurrency import leave_beside_a_call
from tests.contract.test_objects import check_every_verb
from tests.contract.test_p2p import check_from_anybody, from_anybody, in_any_order
from tests.contract.test_parts import counted_in_the_queue
from tests.support import training
from tests.support.backends import Program, on_backend
from tests.support.draw import VERBS
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt
from tests.support.sites import TORCH
from tests.torch import test_limits as limits
from tests.torch.test_torch_works import OP_TYPES, describe_works

FreshPool = Callable[[int, Setup], Pool]
WORLD = 4


def two_nodes(fresh_pool: FreshPool) -> Pool:
    return fresh_pool(WORLD, Setup(init=False, nodes="aabb"))


# Reductions that a carrier may make in another order, where nothing else is asked for.
OTHER_ORDER = tuple((dtype, op) for dtype in ("float16", "bfloat16") for op in ("SUM", "PRODUCT"))


@pytest.mark.slow
def test_every_verb_gives_the_oracles_bits(fresh_pool: FreshPool) -> None:
    meaningless = (*TORCH.limits.meaningless, *OTHER_ORDER)
    limits = dataclasses.replace(TORCH.limits, meaningless=meaningless)
    site = dataclasses.replace(TORCH, world=WORLD, nodes="aabb", limits=limits)
    site = site.on(two_nodes(fresh_pool))
    for verb in VERBS:
        site.check([*site.small_calls(verb), *site.large_calls(verb)])


@pytest.mark.slow
def test_lists_transfers_and_objects(fresh_pool: FreshPool) -> None:
    site = dataclasses.replace(TORCH, world=WORLD).on(two_nodes(fresh_pool))
    for as_list in (False, True):
        site.run(counted_in_the_queue, as_list)
    assert site.run(in_any_order, 1) == [[]] * WORLD
    check_from_anybody(site.run(from_anybody)[0])
    check_every_verb(site.run, WORLD, weights_only=False)
    assert site.run(describe_works) == [[OP_TYPES] * 2] * WORLD
    assert site.run(leave_beside_a_call) == [([float(WORLD**2)] * 3, "")] * WORLD


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [training.data_parallel, training.fully_sharded, training.tensor_parallel]
)
def test_training_is_that_of_one_process(fresh_pool: FreshPool, program: Program) -> None:
    training.check_training(lambda world: two_nodes(fresh_pool), program, WORLD)


def late(rank: Rank, call: str) -> Attempt | None:
    """The ranks of the second node stay away from a group whose limit was made short."""
    group, tensor = dist.new_group(timeout=limits.LONG), torch.ones(2)
    dist.all_reduce(tensor, group=group)
    if rank.rank >= 2:
        rank.wait_for(f"{call} failed")
        return None
    dist.distributed_c10d._set_pg_timeout(limits.LIMIT, group)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "send": lambda: dist.send(tensor, rank.rank + 2, group),
        "within a node": lambda: dist.recv(tensor, 1 - rank.rank, group),
    }
    found = attempt(calls[call])
    rank.tell(f"{call} failed")
    return found


@pytest.mark.long
@pytest.mark.parametrize("call", ["all_reduce", "send", "within a node"])
def test_a_new_limit_of_a_group(fresh_pool: FreshPool, call: str) -> None:
    found = two_nodes(fresh_pool).run(on_backend, "fastcoll", late, call)
    assert found[2:] == [None, None]
    for one in found[:2]:
        assert one.kind == "CollectiveTimeout", one
        assert one.seconds < LATE_S, one
