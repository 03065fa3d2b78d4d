# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries on the CPU: taken where a NumPy array is, by their `__dlpack__`."""

from typing import Any

import numpy as np
import torch

import fastcoll
from tests.support.harness import Attempt, Pools, Rank, attempt


class Shared:
    """An array of a library that is neither torch nor NumPy."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Elsewhere(Shared):
    def __dlpack_device__(self) -> Any:
        return (7, 0)  # Vulkan


def use_shared_arrays(rank: Rank) -> list[Any]:
    comm, me = rank.comm, rank.rank
    pairs = np.arange(4.0).reshape(2, 2) + me
    fixed = pairs.copy()
    fixed.setflags(write=False)
    out, whole = np.empty((2, 2)), np.empty((4, 2))
    found = []
    for _ in range(2):
        comm.all_reduce(Shared(fixed), out=out)
        found.append(out.tolist())
        comm.reduce_scatter_tensor(out[0], Shared(fixed))
        found.append(out[0].tolist())
        comm.all_gather_into_tensor(whole, Shared(fixed))
        found.append(whole.tolist())
        comm.all_to_all_single(out, Shared(fixed))
        found.append(out.tolist())
        comm.broadcast(Shared(fixed) if me == 0 else Shared(out), 0)
        found.append((fixed if me == 0 else out).tolist())
        written = Shared(pairs.copy())
        comm.all_reduce(written)
        found.append(written.array.tolist())
    half = torch.full((3,), 1.0 + me, dtype=torch.bfloat16)
    sums = torch.empty(3, dtype=torch.bfloat16)
    comm.all_reduce(Shared(half), out=sums)  # of a type that NumPy lacks
    found.append(sums.tolist())
    found.append(fastcoll.from_tensor(Shared(fixed)).tolist())
    return found


def test_an_array_with_dlpack_is_taken(pools: Pools) -> None:
    both = [np.arange(4.0).reshape(2, 2) + rank for rank in range(2)]
    total = sum(both)
    for rank, found in enumerate(pools(2).run(use_shared_arrays)):
        exchanged = np.stack([one[rank] for one in both])
        once = [total, total[rank], np.concatenate(both), exchanged, both[0], total]
        right = [one.tolist() for one in once]
        assert found == [*right, *right, [3.0] * 3, both[rank].tolist()]


def misuse_shared_arrays(rank: Rank) -> list[Attempt]:
    fixed = np.zeros(3)
    fixed.setflags(write=False)
    found = [
        attempt(rank.comm.all_reduce, Shared(fixed)),
        attempt(rank.comm.all_reduce, Shared(torch.ones(3, dtype=torch.bfloat16))),
        attempt(rank.comm.all_reduce, Elsewhere(np.ones(3)), out=np.ones(3)),
        attempt(rank.comm.all_reduce, [1.0]),
    ]
    rank.comm.barrier()
    return found


def test_what_can_not_be_taken_is_refused(pools: Pools) -> None:
    for written, half, elsewhere, lists in pools(2).run(misuse_shared_arrays):
        assert written.kind == half.kind == "UsageError"
        for one in (written, half):
            assert "tensor, of type Shared, can't be written" in one.text
        assert elsewhere.kind == "UnsupportedError"
        assert "DLPack's type 7" in elsewhere.text
        assert lists.kind == "UsageError"
