# SPDX-License-Identifier: Apache-2.0
"""torch finds fastcoll by its name, in a program that does not import it."""

import importlib.metadata
import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

import fastcoll_autoload
from tests.support.backends import on_backend
from tests.support.harness import Pool, Rank, Setup
from tests.support.programs import run_python

PROGRAM = """
import sys, torch.multiprocessing as mp, torch.distributed as dist

def rank(me, meeting):
    assert "fastcoll" not in sys.modules
    dist.init_process_group("fastcoll", meeting, rank=me, world_size=2)
    total = [None, None]
    dist.all_gather_object(total, me)
    assert total == [0, 1] and dist.get_backend() == "fastcoll"
    dist.destroy_process_group()

if __name__ == "__main__":
    assert dist.is_backend_available("fastcoll")
    known = "fastcoll" in sys.modules  # from torch 2.14 on, torch asks for the backend itself
    assert not known or hasattr(dist.Backend, "_ensure_backend_registered")
    mp.spawn(rank, ("file://" + sys.argv[1],), nprocs=2)
    print("spawned")
"""


@pytest.mark.long
def test_in_spawned_children_without_an_import(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_python(program, tmp_path / "store")
    assert (done.returncode, done.stdout) == (0, "spawned\n"), done.stderr


def test_the_wheel_names_its_doors() -> None:
    for group in ("torch.backends", "torch.distributed.backends"):
        [entry] = importlib.metadata.entry_points(group=group, name="fastcoll")
        assert callable(entry.load())


def test_a_torch_that_it_does_not_know_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """`import torch` would fail otherwise, in programs that have no use for fastcoll."""
    unknown = SimpleNamespace(Backend=object)
    with patch.dict(sys.modules, {"torch.distributed.distributed_c10d": unknown}):  # type: ignore[dict-item]
        fastcoll_autoload.autoload()
    [record] = caplog.records
    assert (record.name, record.levelno) == ("fastcoll", logging.WARNING)
    assert "can't find fastcoll by name: AttributeError" in record.getMessage()


def gather_shards(rank: Rank) -> list[list[float]] | None:
    """torch makes tensors on the last device of a backend: not on a GPU that isn't there."""
    placements = [f"rank:{peer}/cpu" for peer in range(rank.world_size)]
    spec = ChunkShardingSpec(dim=0, placements=placements)  # type: ignore[arg-type]
    shards = sharded_tensor.full(spec, (4, 2), 3.0)
    whole = torch.zeros(4, 2) if rank.rank == 0 else None
    shards.gather(0, whole)
    return None if whole is None else whole.tolist()


def test_a_sharded_tensor_is_gathered_without_a_gpu(bare_pools: Callable[[int], Pool]) -> None:
    if torch.cuda.device_count() > 0:
        pytest.skip("with a GPU torch takes it")
    rows = bare_pools(2).run(on_backend, "fastcoll", gather_shards)
    assert rows == [[[3.0] * 2] * 4, None]


def default_group(rank: Rank) -> list[str]:
    import fastcoll

    found = []
    for make_default in (lambda: None, fastcoll.make_default):
        make_default()
        store = dist.PrefixStore(str(make_default), rank.store)
        dist.init_process_group(store=store, rank=rank.rank, world_size=rank.world_size)
        world: Any = dist.group.WORLD
        found.append(type(world._get_backend(torch.device("cpu"))).__name__)
        dist.destroy_process_group()
    return found


def test_the_default_of_cpus(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2, Setup(init=False))
    assert pool.run(default_group) == [["ProcessGroupGloo", "ProfiledProcessGroup"]] * 2


def said_of_a_backend(rank: Rank, setting: str) -> list[str]:
    os.environ["FASTCOLL_TORCH_BACKEND"] = setting
    said = io.StringIO()
    with patch.object(sys, "stderr", said):
        for _ in range(2):
            on_backend(rank, "fastcoll", dist_barrier)
    return said.getvalue().splitlines()


def dist_barrier(rank: Rank) -> None:
    del rank
    dist.barrier()


@pytest.mark.parametrize(("setting", "count"), [("auto", 1), ("python", 0)])
def test_one_line_says_that_nothing_was_compiled(
    fresh_pool: Callable[..., Pool], tmp_path: Path, setting: str, count: int
) -> None:
    pool = fresh_pool(2, Setup(init=False, env={"FASTCOLL_CACHE_DIR": str(tmp_path)}))
    lines = [line for said in pool.run(said_of_a_backend, setting) for line in said]
    assert len(lines) == count
    assert all("`fastcoll build` does that once" in line for line in lines)
