# SPDX-License-Identifier: Apache-2.0
"""reduce_scatter of lists whose parts are of one size: where they lie, and of which shapes."""

import random
from typing import Any

import pytest
import torch

import fastcoll
from tests.support.harness import Pools, Rank, attempt


def parts_apart(rank: Rank, seed: int) -> list[str]:
    """reduce_scatter of lists, wherever the parts lie, against the verb for one tensor."""
    me, world, comm = rank.rank, rank.world_size, rank.comm
    own, agreed = random.Random(seed * 64 + me), random.Random(seed)
    numbers = torch.Generator().manual_seed(seed * 64 + me)
    wrong = []
    for number in range(40):
        numel = agreed.choice([0, 1, 7, 12, 13, 300, 5_000, 40_000, 100_000])
        dtype = agreed.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
        op = agreed.choice([fastcoll.ReduceOp.SUM, fastcoll.ReduceOp.MAX])
        how = {"algorithm": agreed.choice(["auto", "auto", "one_shot", "two_shot", "chain"])}
        whole = torch.randint(0, 99, (world * numel,), generator=numbers).to(dtype)
        want = torch.empty(numel, dtype=dtype)
        fastcoll.reduce_scatter_tensor(want, whole, op, comm, **how)
        place = own.choice(["apart", "in order", "the other way round", "odd", "strided"])
        if place == "in order":
            parts = list(whole.clone().view(world, numel))
        elif place == "strided":
            parts = [torch.stack((part, part), 1)[:, 0] for part in whole.view(world, numel)]
        elif place == "odd":
            parts = [torch.cat((part[:1], part))[-numel:] for part in whole.view(world, numel)]
        else:
            parts = [part.clone() for part in whole.view(world, numel)]
            if place == "the other way round":
                memory = torch.empty(world, numel, dtype=dtype).flip(0)
                parts = [row.copy_(part) for row, part in zip(memory, parts, strict=True)]
        given = [part.clone() for part in parts]
        is_in_place = numel > 0 and own.random() < 0.3
        out = parts[me] if is_in_place else torch.full((numel,), 77).to(dtype)
        work = fastcoll.reduce_scatter(out, parts, op, comm, own.random() < 0.5, **how)
        if work:
            work.wait()
        others_kept = all(
            torch.equal(part, before)
            for to, (part, before) in enumerate(zip(parts, given, strict=True))
            if not (is_in_place and to == me)
        )
        if not torch.equal(out, want) or not others_kept:
            wrong.append(f"{number}: {numel} {dtype} {op} {how} {place} {is_in_place}")
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_reduced_parts_may_lie_apart(pools: Pools, world: int) -> None:
    for seed in range(3):
        assert pools(world).run(parts_apart, seed) == [[]] * world


def shapes_differ(rank: Rank) -> list[Any]:
    """Parts of one size but of several shapes: a reduce for each rank, on every rank.

    Also where some ranks' parts are for C++, and others' for Python.
    """
    world = rank.world_size
    plain = [torch.ones(6) for _ in range(world)]
    out = torch.empty(6)
    fastcoll.reduce_scatter(out, plain, group=rank.comm)  # has a plan from here on
    overlaps = attempt(fastcoll.reduce_scatter, plain[rank.rank - 1], plain, group=rank.comm)
    shapes = [(6,), (2, 3), (3, 2)]
    parts = [torch.ones(*shapes[to % 3], 2) for to in range(world)]
    parts = [part[..., 0] if rank.rank == 0 else part[..., 0].clone() for part in parts]
    got = torch.empty(parts[rank.rank].shape)
    fastcoll.reduce_scatter(got, parts, group=rank.comm)
    return [bool((out == world).all()), bool((got == world).all()), overlaps.kind]


def test_parts_of_several_shapes(pools: Pools) -> None:
    assert pools(3).run(shapes_differ) == [[True, True, "UsageError"]] * 3
