# SPDX-License-Identifier: Apache-2.0
"""Which numerics a group has by where it comes from, on CPUs and on GPUs."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import fastcoll
from fastcoll.api.groups import communicator_of
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.settings import resolve
from fastcoll.integrations import torch_backend
from tests.support.harness import Pool, Rank, Setup

FreshPool = Callable[[int, Setup], Pool]
Numerics = dict[str, tuple[str, str]]
MIXED = ("same_bits", "fast")
LIMIT_S = 60.0


def numerics_of(comm: BaseGroup | None) -> tuple[str, str]:
    """Return what holds on CPUs and on GPUs in a group."""
    settings = getattr(comm, "_settings")  # noqa: B009
    return settings.numerics_of(None), settings.numerics_of(None, on_gpus=True)


def numerics_by_origin(rank: Rank) -> Numerics:
    """Make a group in each way there is; `fastcoll` made one before, which a fresh pool ends."""
    theirs = dist.PrefixStore("torch", rank.store)
    dist.init_process_group("fastcoll", store=theirs, rank=rank.rank, world_size=rank.world_size)
    found: Numerics = {"fastcoll.new_group": numerics_of(fastcoll.new_group())}
    world: Any = dist.group.WORLD
    limit = timedelta(seconds=LIMIT_S)
    store = dist.PrefixStore("own", rank.store)
    groups = {
        "init_process_group": world,
        "dist.new_group": dist.new_group(),
        "split_group": world.split_group([0, 1], timeout=limit, group_name="part"),
        "process_group": torch_backend.process_group(store, rank.rank, rank.world_size, limit),
    }
    found |= {name: numerics_of(communicator_of(group)) for name, group in groups.items()}
    if hasattr(dist, "shrink_group") and rank.rank == 0:  # it ends the world
        found["shrink_group"] = numerics_of(communicator_of(dist.shrink_group([1])))
    return found


@pytest.mark.parametrize("backend", ["python", "compiled"])
@pytest.mark.parametrize("asked", ["", "same_bits", "fast"])
def test_groups_of_torch_are_fast_on_gpus(fresh_pool: FreshPool, backend: str, asked: str) -> None:
    env = {"FASTCOLL_TORCH_BACKEND": backend} | ({"FASTCOLL_NUMERICS": asked} if asked else {})
    for found in fresh_pool(2, Setup(env=env)).run(numerics_by_origin):
        assert len(found) >= 5
        for origin, numerics in found.items():
            ours = ("same_bits", "same_bits")
            unset = ours if origin == "fastcoll.new_group" else MIXED
            assert numerics == ((asked, asked) if asked else unset), origin


def test_a_call_or_a_group_that_says_so_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTCOLL_NUMERICS", raising=False)
    settings = resolve(None, None, default_on_gpus="fast")
    assert (settings.numerics_of(None), settings.numerics_of(None, on_gpus=True)) == MIXED
    assert settings.numerics_of("same_bits", on_gpus=True) == "same_bits"
    assert settings.for_part(None, "same_bits").numerics_of(None, on_gpus=True) == "same_bits"
    assert settings.for_part(None, None).numerics_of(None, on_gpus=True) == "fast"
    given = resolve(None, "same_bits", default_on_gpus="fast")
    assert given.numerics_of(None, on_gpus=True) == "same_bits"


def test_ranks_must_agree_on_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTCOLL_NUMERICS", raising=False)
    unset = resolve(None, None, default_on_gpus="fast").terms("gloo").numerics
    monkeypatch.setenv("FASTCOLL_NUMERICS", "same_bits")
    given = resolve(None, None, default_on_gpus="fast").terms("gloo").numerics
    assert (unset, given) == ("same_bits, fast on GPUs", "same_bits")
