# SPDX-License-Identifier: Apache-2.0
"""Symmetric tensors: made, freed in any order, and their memory reused.

Calls that mix them with private ones stand in test_values.py.
"""

import gc
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastcoll
from fastcoll.memory.symmetric import device_of
from tests.support import oracle
from tests.support.harness import Attempt, Pools, Rank, attempt

MEBIBYTE = 1 << 20


def make_all_kinds(rank: Rank) -> list[Any]:
    facts: list[Any] = []
    for name in oracle.DTYPES:
        dtype = getattr(torch, name)
        tensor = fastcoll.empty((3, 5), dtype=dtype)
        zero = fastcoll.zeros(2, 7, dtype=dtype)
        facts += [tensor.shape == (3, 5), tensor.dtype == dtype, zero.shape == (2, 7)]
        facts += [tensor.is_contiguous(), not zero.view(torch.uint8).any().item()]
    copied = fastcoll.from_tensor(torch.arange(6.0).reshape(2, 3).t())
    facts += [copied.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]]
    array = fastcoll.from_tensor(np.arange(4, dtype=np.int16))
    backwards = np.asfortranarray(np.arange(6).reshape(2, 3))[:, ::-1]
    assert fastcoll.from_tensor(backwards).tolist() == [[2, 1, 0], [5, 4, 3]]
    assert fastcoll.from_tensor(np.zeros((0, 3), np.complex64)).shape == (0, 3)
    facts += [array.dtype == torch.int16, array.tolist() == [0, 1, 2, 3]]
    facts += [fastcoll.empty(0).numel() == 0, fastcoll.empty(()).shape == ()]
    facts += [fastcoll.empty(4).dtype == torch.get_default_dtype()]
    return facts


def test_they_are_tensors_like_others(pools: Pools) -> None:
    for facts in pools(2).run(make_all_kinds):
        assert len(facts) > 60
        assert all(facts)


def churn(rank: Rank, seed: int, rounds: int) -> int:
    """Make and drop tensors; each rank drops in an order of its own. The most arenas mapped."""
    plan = random.Random(seed)  # what all ranks do alike
    own = random.Random(seed + 1 + rank.rank)
    held: list[torch.Tensor] = []
    for number in range(rounds):
        numel = plan.choice([0, 1, 100, 5000, MEBIBYTE // 2, MEBIBYTE])
        tensor = fastcoll.empty(numel, dtype=torch.float32)
        tensor.fill_(number + rank.rank)
        held.append(tensor)
        fastcoll.all_reduce(tensor)
        total = rank.world_size * number + rank.world_size * (rank.world_size - 1) // 2
        assert bool((tensor == total).all()), f"tensor {number}"
        tensor.fill_(number)
        while len(held) > own.randrange(1, 8):
            held.pop(own.randrange(len(held)))
        for kept in held:  # nobody else's tensor came to lie on it
            assert kept.numel() == 0 or bool((kept == kept[0]).all())
    del held, tensor
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:")


def test_blocks_are_freed_in_any_order_and_come_back(pools: Pools) -> None:
    """A hundred tensors of up to 4 MiB: more than the library ever maps."""
    pools(3).run(churn, 1, 20)
    before = pools(3).run(churn, 2, 30)
    after = pools(3).run(churn, 3, 80)
    assert after == before


def hold_back(rank: Rank) -> tuple[bool, bool]:
    """Rank 0 keeps a view of a block that all the others have let go."""
    tensor = fastcoll.zeros(1000)
    address = tensor.data_ptr()
    view = tensor[500:] if rank.rank == 0 else None
    if view is not None:
        view.fill_(5)
    del tensor
    gc.collect()
    others = [fastcoll.empty(1000) for _ in range(20)]
    for other in others:
        other.fill_(-1)
        fastcoll.all_reduce(other)
    kept = view is None or bool((view == 5).all())
    reused_early = any(other.data_ptr() == address for other in others)
    del view, others, other
    gc.collect()
    later = [fastcoll.empty(1000) for _ in range(22)]
    return kept and not reused_early, any(other.data_ptr() == address for other in later)


def test_a_block_is_not_reused_before_every_rank_let_it_go(pools: Pools) -> None:
    for kept, reused_later in pools(3).run(hold_back):
        assert kept
        assert reused_later


def of_sizes(rank: Rank, sizes: list[int]) -> Attempt:
    found = attempt(rank.comm.empty, sizes[rank.rank], dtype=torch.uint8)
    tensor = rank.comm.empty(1000).fill_(1)
    rank.comm.all_reduce(tensor)
    assert (tensor == rank.world_size).all()
    return found


@pytest.mark.parametrize(
    ("nodes", "sizes"), [("aa", [8, 16]), ("aabb", [8, 8, 16, 16]), ("aabb", [8, 8, 8, 16])]
)
def test_different_sizes_are_refused_and_the_group_lives(
    pools: Pools, clusters: Pools, nodes: str, sizes: list[int]
) -> None:
    """On one node, between nodes, and on one node of several."""
    pool = pools(2) if nodes == "aa" else clusters(nodes)
    told = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes))
    for one in pool.run(of_sizes, sizes):
        assert one.kind == "DesyncError", one
        assert told in one.text
        assert "can still be used" in one.text


def use_elsewhere(rank: Rank) -> list[float]:
    """A symmetric tensor of one group in the calls of another, and after its own group's end."""
    group = fastcoll.new_group()
    small = fastcoll.new_group([0, 1])
    tensor = fastcoll.empty(70_000, group=group).fill_(1)
    fastcoll.all_reduce(tensor, group=group)
    fastcoll.all_reduce(tensor, group=rank.comm)
    if rank.rank < 2:
        fastcoll.all_reduce(tensor, group=small)
        small.close()
    group.close()
    last = torch.unique(tensor).tolist()
    fastcoll.all_reduce(tensor, group=rank.comm)
    return [*last, *torch.unique(tensor).tolist()]


def test_they_outlive_their_group_and_serve_others(pools: Pools) -> None:
    assert pools(3).run(use_elsewhere) == [[18.0, 45.0], [18.0, 45.0], [9.0, 45.0]]


def large_one(rank: Rank) -> list[float]:
    tensor = fastcoll.empty(20 * MEBIBYTE)  # 80 MiB
    tensor[::4096] = 1
    tensor[-1] = 2
    fastcoll.all_reduce(tensor[-70_001:])
    assert tensor[0] == 1
    return tensor[-1:].tolist()


def test_one_larger_than_an_arena(pools: Pools) -> None:
    assert pools(2).run(large_one) == [[4.0], [4.0]]


def too_large(rank: Rank) -> list[Any]:
    """Ask for more than machines have, processes can map, and rank 1 alone may have."""
    with rank.comm.new_group() as group:  # nobody has given memory back to it
        attempts = [attempt(group.empty, 1 << exponent) for exponent in (42, 61)]
        usual = resource.getrlimit(resource.RLIMIT_AS)
        if rank.rank == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + 150 * MEBIBYTE
            resource.setrlimit(resource.RLIMIT_AS, (most, usual[1]))
        attempts.append(attempt(group.empty, 80 * MEBIBYTE, dtype=torch.uint8))
        resource.setrlimit(resource.RLIMIT_AS, usual)
        tensor = group.empty(80 * MEBIBYTE, dtype=torch.uint8)
        tensor[-1] = rank.rank + 1
        group.all_reduce(tensor)
        return [attempts, tensor[-1].item()]


def test_one_too_large_for_the_machine_or_a_rank(pools: Pools) -> None:
    for [of_machine, of_anybody, of_rank], total in pools(2).run(too_large):
        assert [one.kind for one in (of_machine, of_rank)] == ["DriverError"] * 2
        assert "rank 0: its machine has less" in of_machine.text
        assert "rank 0" not in of_rank.text
        assert "rank 1: it can't map" in of_rank.text
        assert of_anybody.kind == "UsageError"
        assert total == 3


def test_a_number_is_a_gpu() -> None:
    assert [device_of(one) for one in (None, 1, "cuda:1")] == [
        torch.device(name) for name in ("cpu", "cuda:1", "cuda:1")
    ]
    for odd in (-1, True, "0", 1.5):
        with pytest.raises(fastcoll.UsageError, match="device must be"):
            device_of(odd)
