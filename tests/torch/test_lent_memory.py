# SPDX-License-Identifier: Apache-2.0
"""Memory that the compiled backend lends to DDP and FSDP2: shared, and else like any other."""

import copy
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from tests.support.backends import COMPILE_S, on_backend, same
from tests.support.harness import Pool, Rank, attempt

# A rank may be compiling when its pool is asked for the first time.
pytestmark = [pytest.mark.native, pytest.mark.timeout(2 * COMPILE_S)]


# ---- where it lies -------------------------------------------------------------------------------


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that processes share."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return "memfd:" in line
    raise AssertionError("no such memory")


def buckets(rank: Rank, disable: str | None) -> tuple[set[bool], float]:
    """Train a little; return where the buckets lie, and a gradient."""
    places = set()

    def reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        places.add(is_shared(bucket.buffer()))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    kept = os.environ["DDP_DISABLE_COMM_MEM"]  # by making the group
    if disable is not None:
        os.environ["DDP_DISABLE_COMM_MEM"] = disable
    try:
        layers = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2))
        model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.01)  # type: ignore[arg-type]
        model.register_comm_hook(None, reduce)
        for _ in range(3):  # after the first, the buckets are made anew
            model.zero_grad()
            model(torch.full((4, 300), rank.rank + 1.0)).sum().backward()
    finally:
        os.environ["DDP_DISABLE_COMM_MEM"] = kept
    assert layers[1].bias.grad is not None
    return places, layers[1].bias.grad[0].item()


@pytest.mark.parametrize(("disable", "shared"), [(None, {True}), ("1", {False})])
def test_buckets_lie_where_all_ranks_reach_them(
    compiled_pools: Callable[[int], Pool], disable: str | None, shared: set[bool]
) -> None:
    rows = compiled_pools(2).run(on_backend, "fastcoll", buckets, disable)
    assert rows == [(shared, 8.0)] * 2


def lent(rank: Rank) -> list[bool]:
    """As FSDP2 asks for what it communicates from (set_allocate_memory_from_process_group)."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    backend = group._get_backend(cpu)
    tensors = [backend.allocate_tensor(9, dtype=dtype, device=cpu) for dtype in DTYPES]
    found = [(tensor.numel(), tensor.dtype) for tensor in tensors]
    assert found == [*((9, dtype) for dtype in DTYPES[:-1]), (18, torch.float32)]
    return [backend.supports_tensor_alloc(cpu), *map(is_shared, tensors)]


DTYPES = (torch.float32, torch.bfloat16, torch.uint16, torch.complex64)


def test_memory_is_lent(compiled_pools: Callable[[int], Pool]) -> None:
    """A tensor of a dtype that the backend does not know is plain."""
    rows = compiled_pools(2).run(on_backend, "fastcoll", lent)
    assert rows == [[True, True, True, False, True]] * 2


class ComplexModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6).reshape(2, 3) * (1 + 2j))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows * self.weight).abs().sum()


def complex_gradients(rank: Rank) -> list[torch.Tensor]:
    model = torch.nn.parallel.DistributedDataParallel(ComplexModel())
    for turn in range(2):
        model(torch.full((2, 3), 1.0 + rank.rank + turn)).backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    return [gradient]


def test_complex_parameters_in_ddp(compiled_pools: Callable[[int], Pool]) -> None:
    ours = compiled_pools(2).run(on_backend, "fastcoll", complex_gradients)
    assert same(ours, compiled_pools(2).run(on_backend, "gloo", complex_gradients))


# ---- whoever has it may free it and let it grow --------------------------------------------------


def resized_by_a_hook(rank: Rank) -> list[torch.Tensor]:
    """Gradients of models whose hook lets its bucket grow, on the first rank for good."""

    def reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        numel = buffer.numel()
        buffer.resize_(numel + 300 * (1 + rank.rank)).div_(rank.world_size)
        buffer.resize_(numel)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    gradients = []
    for as_views in (False, True):
        torch.manual_seed(3)
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(30, 20), gradient_as_bucket_view=as_views
        )
        model.register_comm_hook(None, reduce)  # type: ignore[arg-type]
        for turn in range(3):
            model.zero_grad(set_to_none=False)
            model(torch.full((2, 30), 1.0 + rank.rank + turn)).square().sum().backward()
            gradients += [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return gradients


def freed_gradients(rank: Rank) -> list[torch.Tensor]:
    """Gradients that are views of a bucket, freed on the last rank after each step."""
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(30, 20), gradient_as_bucket_view=True
    )
    gradients = []
    for turn in range(3):
        model(torch.full((2, 30), 1.0 + rank.rank + turn)).sum().backward()
        for one in model.parameters():
            assert one.grad is not None
            gradients.append(one.grad.clone())
        storage = model.module.weight.grad.untyped_storage()
        if rank.rank == rank.world_size - 1:
            num_bytes = storage.nbytes()
            storage.resize_(0)
            storage.resize_(num_bytes)
        storage.fill_(0)
    return gradients


@pytest.mark.parametrize("program", [resized_by_a_hook, freed_gradients])
def test_buckets_may_be_resized(
    compiled_pools: Callable[[int], Pool], program: Callable[[Rank], list[torch.Tensor]]
) -> None:
    ours = compiled_pools(2).run(on_backend, "fastcoll", program)
    assert same(ours, compiled_pools(2).run(on_backend, "gloo", program))


def borrowed(numel: int) -> torch.Tensor:
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    return group._get_backend(cpu).allocate_tensor(numel, dtype=torch.float32, device=cpu)


def sums_are_right(tensor: torch.Tensor) -> bool:
    """So often that the plan is known, by torch's functions and by fastcoll's."""
    world, found = dist.get_world_size(), []
    for reduce in (dist.all_reduce, fastcoll.all_reduce) * 2:
        tensor.copy_(torch.arange(tensor.numel()))
        reduce(tensor)
        found.append(torch.equal(tensor, torch.arange(tensor.numel()) * float(world)))
    return all(found)


def moved_on_one_rank(rank: Rank) -> list[Any]:
    """After calls on shared memory, rank 1 has that of its tensor moved; the next calls."""

    def grown(tensor: torch.Tensor) -> torch.Tensor:
        start = tensor.clone()
        tensor.resize_(9000)
        assert torch.equal(tensor[:5000], start)
        return tensor.resize_(5000)

    def freed(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storage.resize_(0)
        assert attempt(dist.all_reduce, tensor).kind == "UsageError"
        storage.resize_(4 * 5000)
        return tensor

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        return torch.load(file)  # type: ignore[no-any-return]

    found = []
    for move in (
        grown,
        freed,
        saved,
        copy.deepcopy,
        lambda tensor: pickle.loads(pickle.dumps(tensor)),
        torch.Tensor.share_memory_,
    ):
        tensor = borrowed(5000)
        assert is_shared(tensor)
        assert sums_are_right(tensor)
        if rank.rank == 1:
            old = tensor.data_ptr()
            tensor = move(tensor)
            found.append(tensor.data_ptr() != old)
        found.append(sums_are_right(tensor))
    return found


def test_moved_memory_is_like_any_other(compiled_pools: Callable[[int], Pool]) -> None:
    stayed, moved = compiled_pools(2).run(on_backend, "fastcoll", moved_on_one_rank)
    assert stayed == [True] * 6
    assert moved == [True] * 12


def freed_again_and_again(rank: Rank) -> int:
    """How many places are lent in turn, each freed by another way than the tensor's end."""
    places, kept = set(), []
    for turn in range(100):
        tensor = borrowed(1 << 20)
        places.add(tensor.data_ptr())
        tensor.untyped_storage().resize_(turn % 2)
        kept.append(tensor)
    return len(places)


def test_what_is_freed_is_lent_again(compiled_pools: Callable[[int], Pool]) -> None:
    assert compiled_pools(2).run(on_backend, "fastcoll", freed_again_and_again) == [1, 1]
