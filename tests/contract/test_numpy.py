# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays as arguments: of any layout, and lists of dtypes that torch does not take.

Every dtype and verb stands in test_values.py.
"""

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import fastcoll
from tests.support.harness import Pools, Rank


def reduce_layouts(rank: Rank) -> dict[str, Any]:
    mine = np.arange(12, dtype=np.float64).reshape(3, 4) + rank.rank
    results: dict[str, Any] = {}
    backwards = mine.copy()
    fastcoll.all_reduce(backwards[::-1, ::-1])
    results["backwards"] = backwards.tolist()
    fortran = np.asfortranarray(mine)
    fastcoll.all_reduce(fortran, fastcoll.ReduceOp.SUM, rank.comm)
    assert fortran.flags.f_contiguous
    results["fortran"] = fortran.tolist()
    broadcast = np.broadcast_to(np.float64(rank.rank), (2, 3))
    out = np.empty((2, 3))
    fastcoll.all_reduce(broadcast, out=out)
    results["broadcast"] = out.tolist()
    for shape in ((0,), (0, 3), (2, 0, 3)):  # NumPy has strides of 0 there
        fastcoll.all_reduce(np.zeros(shape))
        fastcoll.broadcast(np.zeros(shape), 0)
    single = np.array(rank.rank, np.int32)
    fastcoll.all_reduce(single)
    results["no dimension"] = int(single)
    fixed = mine.copy()
    fixed.setflags(write=False)
    out = np.empty((3, 4))
    fastcoll.all_reduce(fixed, out=out)
    results["read-only input"] = out.tolist()
    tensor = torch.empty(3, 4, dtype=torch.float64)
    fastcoll.all_reduce(mine, out=tensor)
    results["array in, tensor out"] = tensor.tolist()
    return results


def test_layouts(pools: Pools) -> None:
    total = (2 * np.arange(12.0).reshape(3, 4) + 1).tolist()
    for results in pools(2).run(reduce_layouts):
        assert results == {
            "backwards": total,
            "fortran": total,
            "broadcast": [[1.0] * 3] * 2,
            "no dimension": 1,
            "read-only input": total,
            "array in, tensor out": total,
        }


SMALL_FLOATS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def lists_of_arrays(rank: Rank, dtype: str) -> dict[str, list[list[float]]]:
    """Calls with an array for each rank, which lie apart; those that are only read say so."""
    comm, world = rank.comm, rank.world_size

    def given(value: float) -> np.ndarray[Any, Any]:
        array = np.full(5, value, getattr(ml_dtypes, dtype))
        array.setflags(write=False)
        return array

    def got() -> np.ndarray[Any, Any]:
        return np.zeros(5, getattr(ml_dtypes, dtype))

    sums, part = got(), got()
    gathered, swapped = [got() for _ in range(world)], [got() for _ in range(world)]
    parts = [given(rank.rank + number) for number in range(world)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastcoll.reduce_scatter(sums, parts, group=comm)
        fastcoll.all_gather(gathered, given(rank.rank), group=comm)
        fastcoll.all_to_all(swapped, parts, group=comm)
        fastcoll.scatter(part, parts if rank.rank == 0 else None, 0, group=comm)
    results = {"sums": [sums], "gathered": gathered, "swapped": swapped, "part": [part]}
    return {name: [one.astype(float).tolist() for one in ones] for name, ones in results.items()}


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_lists_of_arrays_that_torch_does_not_take(pools: Pools, dtype: str) -> None:
    for me, results in enumerate(pools(2).run(lists_of_arrays, dtype)):
        assert results == {
            "sums": [[1.0 + 2 * me] * 5],
            "gathered": [[0.0] * 5, [1.0] * 5],
            "swapped": [[float(me)] * 5, [1.0 + me] * 5],
            "part": [[float(me)] * 5],
        }
