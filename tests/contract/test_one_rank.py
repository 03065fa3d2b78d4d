# SPDX-License-Identifier: Apache-2.0
"""A group of one rank has nothing to combine: every form of a reduction gives the input's bits.

Decides the forms. The inputs are NaNs with a payload each, which any arithmetic would make alike.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from tests.support.backends import COMPILE_S, on_backend
from tests.support.harness import Pools, Rank

SIZES = (1, 7, 4099, 300_000)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
KINDS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


def nans(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """NaNs, none of which has the canonical bits; their signs alternate."""
    word = KINDS[dtype]
    infinity = torch.tensor(float("inf"), dtype=dtype).view(word)
    bits = torch.arange(numel, dtype=word) % 60 + 1 + infinity
    bits[::2] |= torch.iinfo(word).min
    return bits.view(dtype)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], 1)[:, 0]


def forms(calls: Any, op: Any) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    def in_place(tensor: torch.Tensor) -> torch.Tensor:
        calls.all_reduce(tensor, op)
        return tensor

    def in_flight(tensor: torch.Tensor) -> torch.Tensor:
        calls.all_reduce(tensor, op, async_op=True).wait()
        return tensor

    def to_root(tensor: torch.Tensor) -> torch.Tensor:
        calls.reduce(tensor, 0, op)
        return tensor

    def scattered(tensor: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(tensor)
        calls.reduce_scatter_tensor(output, tensor, op)
        return output

    def scattered_list(tensor: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(tensor)
        calls.reduce_scatter(output, [tensor], op)
        return output

    def coalesced(tensor: torch.Tensor) -> torch.Tensor:
        halves = [half.clone() for half in tensor.tensor_split(2)]
        calls.all_reduce_coalesced(halves, op)
        return torch.cat(halves)

    return {
        "in place": in_place,
        "in flight": in_flight,
        "to the root": to_root,
        "scattered": scattered,
        "scattered list": scattered_list,
        "coalesced": coalesced,
        "strided": lambda tensor: in_place(strided(tensor)),
    }


def reduce_alone(calls: Any, ops: Any, names: tuple[str, ...]) -> list[str]:
    """Reduce in every form, twice, as the second call is a known one; those with other bits."""
    wrong = []
    for op in names:
        for form, reduce in forms(calls, getattr(ops, op)).items():
            for dtype, word in KINDS.items():
                for numel in SIZES * 2:
                    given = nans(numel, dtype)
                    got = reduce(given.clone()).contiguous()
                    if not torch.equal(got.view(word), given.view(word)):
                        wrong.append(f"{op}, {form}, {numel} {dtype}")
    return wrong


def in_its_group(rank: Rank) -> list[str]:
    return reduce_alone(rank.comm, fastcoll.ReduceOp, OPS)


def in_torch(rank: Rank) -> list[str]:
    return reduce_alone(dist, dist.ReduceOp, OPS)


def test_one_rank_gets_its_own_bits(pools: Pools) -> None:
    assert pools(1).run(in_its_group) == [[]]


def test_one_rank_of_torch_gets_its_own_bits(bare_pools: Pools) -> None:
    assert bare_pools(1).run(on_backend, "fastcoll", in_torch) == [[]]


@pytest.mark.native
@pytest.mark.timeout(2 * COMPILE_S)
def test_one_rank_of_the_compiled_backend_gets_its_own_bits(compiled_pools: Pools) -> None:
    assert compiled_pools(1).run(on_backend, "fastcoll", in_torch) == [[]]
