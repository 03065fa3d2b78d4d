# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays as arguments: of every dtype NumPy has, of any layout, mixed with tensors."""

from typing import Any

import numpy as np
import torch

import fastcoll
from tests.support import oracle
from tests.support.calls import NUMPY_DTYPES, Call, Place
from tests.support.harness import Pools, Rank
from tests.support.perform import check


def test_every_dtype_and_verb(pools: Pools) -> None:
    spots = (Place("numpy", 1, in_place=True), Place("numpy"), Place("private", 2))
    calls = [
        Call(verb, dtype, 37, "SUM", root=1, places=spots, seed=number)
        for number, dtype in enumerate(NUMPY_DTYPES)
        for verb in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    ]
    assert {"float16", "float64", *oracle.INTEGERS, "bool", "complex64"} < {*NUMPY_DTYPES}
    assert not {"bfloat16", "float8_e4m3fn", "float8_e5m2"} & {*NUMPY_DTYPES}
    assert check(pools(3), calls) == len(calls)


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
