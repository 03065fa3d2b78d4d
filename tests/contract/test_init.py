# SPDX-License-Identifier: Apache-2.0
"""How the default group comes to be, and how it ends."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from tests.support.harness import Attempt, Pool, Rank, Setup, attempt
from tests.support.launched import free_port

BARE = Setup(init=False)


def launched(rank: Rank, port: int) -> None:
    """Set what torchrun tells a rank."""
    os.environ.update(
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_RANK=str(rank.rank),
        LOCAL_WORLD_SIZE=str(rank.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def total(rank: Rank) -> float:
    """Return the sum of `rank + 1` over all ranks, made in the default group."""
    tensor = torch.tensor([rank.rank + 1.0])
    fastcoll.all_reduce(tensor)
    return tensor.item()


def from_the_environment(rank: Rank) -> list[Any]:
    comm = fastcoll.init(timeout_s=15)
    facts = [comm.rank, comm.world_size, total(rank)]
    fastcoll.destroy()
    return facts


def from_the_launcher(rank: Rank, port: int) -> list[Any]:
    launched(rank, port)
    return from_the_environment(rank)


def from_mpirun(rank: Rank, size: str) -> list[Any]:
    os.environ.update(PMI_RANK=str(rank.rank), PMI_SIZE=size, MPI_LOCALNRANKS=size)
    return from_the_environment(rank)


def by_itself(rank: Rank, port: int) -> list[float]:
    """The first call of the module makes the group; after destroy `init` makes another."""
    launched(rank, port)
    first = total(rank)
    fastcoll.barrier()
    fastcoll.destroy()
    fastcoll.init()
    second = fastcoll.zeros(3)
    second += 1
    fastcoll.all_reduce(second)
    return [first, second[2].item()]


def from_torch(rank: Rank, way: str) -> list[Any]:
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)
    if way == "given":
        fastcoll.init(dist.group.WORLD)
    elif way == "found":
        fastcoll.init()
    facts = [total(rank)]
    dist.destroy_process_group()
    facts += [total(rank)] if way != "by itself" else []
    fastcoll.destroy()
    return facts


def from_a_store(rank: Rank, path: str) -> list[Any]:
    store = dist.FileStore(path, rank.world_size)
    with fastcoll.init(store=store, rank=rank.rank, world_size=rank.world_size) as comm:
        facts: list[Any] = [comm.rank, comm.world_size, total(rank)]
        assert f"rank {rank.rank} of {rank.world_size}" in repr(comm)
    after = attempt(fastcoll.all_reduce, torch.ones(1))
    return [*facts, after.kind == "UsageError" and "fastcoll.init" in after.text]


@pytest.fixture
def bare(fresh_pool: Any) -> Pool:
    """Three ranks that have not called init."""
    return fresh_pool(3, BARE)


def test_from_the_launchers_environment(bare: Pool) -> None:
    assert bare.run(from_the_launcher, free_port()) == [[rank, 3, 6.0] for rank in range(3)]


def test_from_the_environment_of_an_mpi(bare: Pool) -> None:
    assert bare.run(from_mpirun, "3") == [[rank, 3, 6.0] for rank in range(3)]


def test_a_call_initialises_by_itself(bare: Pool) -> None:
    assert bare.run(by_itself, free_port()) == [[6.0, 3.0]] * 3


@pytest.mark.parametrize("way", ["given", "found", "by itself"])
def test_from_a_group_of_torch(bare: Pool, way: str) -> None:
    assert bare.run(from_torch, way) == [[6.0, 6.0] if way != "by itself" else [6.0]] * 3


def test_from_an_explicit_store(bare: Pool, tmp_path: Path) -> None:
    results = bare.run(from_a_store, str(tmp_path / "store"))
    assert results == [[rank, 3, 6.0, True] for rank in range(3)]


def after_a_failure(rank: Rank) -> list[Any]:
    """Rank 1 misses the first attempt; on the same store, the next one works."""
    options = {"store": rank.store, "rank": rank.rank, "world_size": rank.world_size}
    first = None
    if rank.rank == 0:
        first = attempt(fastcoll.init, **options, timeout_s=0.5).kind
        rank.tell("rank 0 failed")
    else:
        rank.wait_for("rank 0 failed")
    fastcoll.init(**options, timeout_s=20)
    return [first, total(rank)]


def test_init_again_after_a_rank_did_not_come(fresh_pool: Any) -> None:
    assert fresh_pool(2, BARE).run(after_a_failure) == [["CollectiveTimeout", 3.0], [None, 3.0]]


def as_rank_zero(rank: Rank) -> tuple[int, Attempt]:
    options = {"store": dist.PrefixStore("alike", rank.store), "rank": 0, "world_size": 2}
    return os.getpid(), attempt(fastcoll.init, **options, timeout_s=1.5)


def test_two_processes_that_claim_one_rank(fresh_pool: Any) -> None:
    (one_pid, one), (other_pid, other) = fresh_pool(2, BARE).run(as_rank_zero)
    for mine, found, theirs in ((one_pid, one, other_pid), (other_pid, other, one_pid)):
        assert found.kind == "CollectiveTimeout"
        assert re.search(rf"process {theirs} on \S+ came as rank 0", found.text)
        assert re.search(rf"beside this process {mine} on", found.text)
        assert found.ranks == (1,)


def again_and_again(rank: Rank, rounds: int) -> list[float]:
    values = []
    for number in range(rounds):
        store = dist.PrefixStore(f"round {number}", rank.store)
        fastcoll.init(store=store, rank=rank.rank, world_size=rank.world_size)
        values.append(total(rank))
        fastcoll.destroy()
    return values


def test_init_and_destroy_again_and_again(bare: Pool) -> None:
    assert bare.run(again_and_again, 20) == [[6.0] * 20] * 3


PROGRAM = """
import sys, torch, fastcoll
tensor = torch.ones(1000)
fastcoll.all_reduce(tensor)
sys.stdout.write(f"sum {tensor[0].item()}\\n")  # in one piece: ranks share the pipe
"""


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = subprocess.run(
        [*command, str(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0") == 3
    assert "Traceback" not in done.stderr
