# SPDX-License-Identifier: Apache-2.0
"""Types and operations that programs know from NCCL: types that are only moved, and PREMUL_SUM."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.types import MOVED
from tests.support.backends import IS_COMPILED, TorchGroup, on_torch
from tests.support.harness import Pool, Rank, Setup, attempt

WORLD = 3
FreshPool = Callable[[int, Setup], Pool]
PLACES = [
    ("native", ""),
    ("native", "aab"),
    ("python", ""),
    ("python", "aab"),
    pytest.param(("compiled", ""), marks=IS_COMPILED),
]


@pytest.fixture(params=PLACES, ids=lambda place: " ".join(place).strip())
def run(request: pytest.FixtureRequest, fresh_pool: FreshPool) -> Callable[..., list[Any]]:
    """`run(program, ...)` runs it on three ranks, by fastcoll's functions or by torch's."""
    backend, nodes = request.param
    if backend == "native":
        return fresh_pool(WORLD, Setup(nodes=nodes)).run
    env = {"FASTCOLL_TORCH_BACKEND": backend}
    pool = fresh_pool(WORLD, Setup(init=False, nodes=nodes, env=env))
    return lambda *args: pool.run(on_torch, *args)


def words(dtype: torch.dtype, seed: int, numel: int = 2) -> torch.Tensor:
    """Elements of every kind of bits."""
    num_bytes = numel * dtype.itemsize
    return ((torch.arange(num_bytes) * 37 + 91 * seed) % 256).to(torch.uint8).view(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()


def move(rank: Rank, name: str) -> list[str]:
    """Move elements by each verb; name those that changed, and reductions that ran."""
    dtype, comm, me = getattr(torch, name), rank.comm, rank.rank
    mine, everything = words(dtype, me), torch.cat([words(dtype, r) for r in range(WORLD)])
    rows = list(everything.chunk(WORLD))
    whole, parts, sent = words(dtype, 9, 2 * WORLD), [words(dtype, 9) for _ in rows], mine.clone()
    wrong = []

    def expect(verb: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if bits(got) != bits(want):
            wrong.append(verb)

    comm.broadcast(sent, 1)
    expect("broadcast", sent, rows[1])
    comm.all_gather_into_tensor(whole, mine)
    expect("all_gather_into_tensor", whole, everything)
    comm.all_gather(parts, mine)
    expect("all_gather", torch.cat(parts), everything)
    strided = words(dtype, 9, 4)[::2]
    comm.scatter(strided, rows if me == 0 else None, 0)
    expect("scatter", strided, mine)
    comm.all_to_all_single(whole, torch.cat([mine] * WORLD))
    expect("all_to_all_single", whole, everything)
    taken = words(dtype, 9)
    works = [comm.isend(mine, (me + 1) % WORLD), comm.irecv(taken, (me - 1) % WORLD)]
    [work.wait() for work in works]
    expect("recv", taken, rows[(me - 1) % WORLD])
    if dtype.is_complex and isinstance(comm, TorchGroup):  # which torch reduces as pairs of float16
        return wrong
    refused = attempt(comm.all_reduce, mine)
    if refused.kind != "UnsupportedError" or name not in refused.text:
        wrong.append(f"all_reduce: {refused}")
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("name", [str(dtype).removeprefix("torch.") for dtype in MOVED])
def test_types_without_arithmetic_are_moved(run: Callable[..., list[Any]], name: str) -> None:
    assert run(move, name) == [[]] * WORLD


def scale(rank: Rank) -> list[list[float]]:
    """Sum what each rank scales by a factor of its own: 1, 1/2, 1/4."""
    comm, me = rank.comm, rank.rank
    op = dist._make_nccl_premul_sum(0.5**me)
    mine = torch.tensor([4.0, 8.0, 12.0])
    found = [mine.clone() for _ in range(3)]
    comm.all_reduce(found[0], op)
    comm.reduce(found[1], 1, op)
    comm.all_reduce_coalesced([found[2]], op)
    part = torch.zeros(1)
    comm.reduce_scatter_tensor(part, mine, op)
    listed = torch.zeros(1)
    comm.reduce_scatter(listed, list(mine.split(1)), op)
    whole = torch.full((3,), 5, dtype=torch.int32)
    comm.all_reduce(whole, dist._make_nccl_premul_sum(float(me)))
    half = torch.full((1,), 3.0, dtype=torch.bfloat16)
    comm.all_reduce(half, dist._make_nccl_premul_sum(torch.tensor([0.1], dtype=torch.bfloat16)))
    return [one.tolist() for one in (*found, part, listed, whole, half)]


def test_premul_sum(run: Callable[..., list[Any]]) -> None:
    total = [7.0, 14.0, 21.0]
    # 3 * bf16(0.1), rounded; three of it, rounded once
    scaled = torch.tensor([3.0], dtype=torch.bfloat16) * torch.tensor([0.1], dtype=torch.bfloat16)
    half = (scaled.float() * 3).bfloat16().tolist()
    for rank, found in enumerate(run(scale)):
        mine = total if rank == 1 else [4.0, 8.0, 12.0]
        part = [total[rank]]
        assert found == [total, mine, total, part, part, [15] * 3, half]


def keep(rank: Rank) -> Any:
    """An input is not changed by a call that is refused, nor where the result goes elsewhere."""
    mine, out = torch.ones(2), torch.zeros(2)
    op = dist._make_nccl_premul_sum(3.0)
    fastcoll.all_reduce(mine, op, rank.comm, out=out)
    fastcoll.all_reduce(mine.numpy(), op, rank.comm, out=out.numpy())
    refused = attempt(fastcoll.all_reduce, mine, op, rank.comm, out=torch.zeros(3))
    return mine.tolist(), out.tolist(), refused.kind


def test_premul_sum_leaves_inputs_alone(fresh_pool: FreshPool) -> None:
    assert fresh_pool(2, Setup()).run(keep) == [([1.0, 1.0], [6.0, 6.0], "UsageError")] * 2
