# SPDX-License-Identifier: Apache-2.0
"""Arrays of CuPy's kind in every verb: which memory is taken, and in which stream a call runs.

With the CPU in the kernels' place (support/fake_gpu.py); CuPy's own: tests/gpu/test_arrays.py.
"""

from typing import Any

import pytest
import torch

import fastcoll
from fastcoll.calls import foreign
from fastcoll.calls.batches import P2POp
from fastcoll.errors import UnsupportedError, UsageError
from tests.support.gpu import needs_gpu_part
from tests.support.harness import Pools, Rank
from tests.support.sites import group_on_fake_gpu

pytestmark = needs_gpu_part

THEIRS = 0x70  # the stream that the made-up library works in


class Numba:
    """An array that says where it lies, and in which stream its library works now."""

    def __init__(self, tensor: Any, stream: int | None = THEIRS, read_only: bool = False) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr() if tensor.numel() else 0, read_only),
            "stream": stream,
        }


class CuPy(Numba):
    """An array that knows DLPack, too."""

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        assert stream == -1, "the order is not DLPack's business"
        return self.tensor.__dlpack__()


def filled(numel: int, value: float) -> CuPy:
    return CuPy(torch.full((numel,), float(value)))


def is_full(array: CuPy, value: float) -> bool:
    return bool((array.tensor == value).all())


def collectives(comm: Any) -> list[bool]:
    me, world = comm.rank, comm.world_size
    total, right = sum(range(world)), []
    tensor, out = filled(6, me), filled(6, -1)
    fastcoll.all_reduce(tensor, out=out, group=comm)
    right += [is_full(tensor, me), is_full(out, total)]
    fastcoll.all_reduce(tensor, group=comm)
    right.append(is_full(tensor, total))
    out = filled(2, -1)
    fastcoll.reduce_scatter_tensor(out, filled(2 * world, me), group=comm)
    right.append(is_full(out, total))
    out = filled(2, -1)
    fastcoll.reduce_scatter(out, [filled(2, me + to) for to in range(world)], group=comm)
    right.append(is_full(out, total + world * me))
    tensor = filled(3, me)
    fastcoll.reduce(tensor, 1, group=comm)
    right.append(me != 1 or is_full(tensor, total))
    out = filled(2 * world, -1)
    fastcoll.all_gather_into_tensor(out, filled(2, me), group=comm)
    right.append(out.tensor.tolist() == [float(r) for r in range(world) for _ in range(2)])
    outs = [filled(1 + by, -1) for by in range(world)]
    fastcoll.all_gather(outs, filled(1 + me, me), group=comm)
    right += [is_full(one, by) for by, one in enumerate(outs)]
    tensor = filled(4, me)
    fastcoll.broadcast(tensor, 1, group=comm)
    right.append(is_full(tensor, 1))
    outs = [filled(2, -1) for _ in range(world)]
    fastcoll.gather(filled(2, me), outs if me == 0 else None, 0, group=comm)
    right += [me != 0 or is_full(one, by) for by, one in enumerate(outs)]
    out, parts = filled(2, -1), [filled(2, to) for to in range(world)]
    fastcoll.scatter(out, parts if me == 0 else None, 0, group=comm)
    right.append(is_full(out, me))
    out = filled(world, -1)
    fastcoll.all_to_all_single(out, CuPy(torch.arange(float(world)) + 10 * me), group=comm)
    right.append(out.tensor.tolist() == [10.0 * by + me for by in range(world)])
    outs = [filled(2, -1) for _ in range(world)]
    fastcoll.all_to_all(outs, [filled(2, 10 * me + to) for to in range(world)], group=comm)
    right += [is_full(one, 10 * by + me) for by, one in enumerate(outs)]
    several = [filled(3, me), filled(5, 1)]
    fastcoll.all_reduce_coalesced(several, group=comm)
    right += [is_full(several[0], total), is_full(several[1], world)]
    return right


def verbs(rank: Rank) -> tuple[list[bool], list[int], list[list[int]]]:
    """Every verb; in which streams it ran, and what torch's and the library's waited for."""
    me, world = rank.rank, rank.world_size
    with group_on_fake_gpu(rank) as (comm, core):
        right = collectives(comm)
        got, left = filled(4, -1), (me - 1) % world
        ops = [P2POp("isend", filled(4, me), (me + 1) % world), P2POp("irecv", got, left)]
        for work in comm.batch_isend_irecv(ops):
            work.wait()
        right.append(is_full(got, left))
        return right, core.launched_in, [core.streams.made[one].waited for one in (0, THEIRS)]


def test_every_verb_runs_in_the_stream_of_the_arrays_library(own_pools: Pools) -> None:
    for right, launched_in, (torchs, theirs) in own_pools(3).run(verbs):
        assert right == [True] * len(right)
        assert len(launched_in) > 12
        # The batch runs beside it, and its two handles let both wait.
        assert set(launched_in[:-1]) == {THEIRS}
        assert torchs == theirs == [-1, -1], "nothing else is ordered"


def mixed(rank: Rank) -> tuple[list[bool], list[int], list[list[int]]]:
    """A tensor of torch's and an array of theirs in one call; then torch's stream as theirs."""
    with group_on_fake_gpu(rank) as (comm, core):
        tensor, out = torch.ones(5), filled(5, -1)
        comm.all_reduce(tensor, out=out)
        right = [is_full(out, comm.world_size)]
        legacy = CuPy(torch.ones(5), stream=1)  # the default stream, which is torch's current one
        comm.all_reduce(legacy)
        right.append(is_full(legacy, comm.world_size))
        return right, core.launched_in, [core.streams.made[one].waited for one in (0, THEIRS)]


def test_a_call_with_tensors_too_is_ordered_among_both_streams(own_pools: Pools) -> None:
    for right, launched_in, waited in own_pools(2).run(mixed):
        assert right == [True, True]
        assert launched_in == [THEIRS, 0]
        assert waited == [[THEIRS], [0]]


def refused(rank: Rank) -> list[str]:
    texts, frozen = [], CuPy(torch.ones(5), read_only=True)
    with group_on_fake_gpu(rank) as (comm, core):
        # A library without DLPack, on another device: torch would make a copy there.
        foreign.torch.as_tensor = lambda array, device: array.tensor.clone()
        for kind, array in ((UsageError, frozen), (UnsupportedError, Numba(torch.ones(5)))):
            with pytest.raises(kind) as caught:
                comm.all_reduce(array)
            texts.append(str(caught.value))
        foreign.torch.as_tensor = lambda array, device: array.tensor
        out = torch.empty(5)
        comm.all_reduce(frozen, out=out)
        same = Numba(torch.ones(5), stream=None)  # it says nothing of streams
        comm.all_reduce(same)
        texts += [str(float(out[0])), str(float(same.tensor[0])), str(core.launched_in)]
    return texts


def test_what_can_be_no_output_is_refused(own_pools: Pools) -> None:
    for texts in own_pools(2).run(refused):
        assert "is read-only" in texts[0]
        assert "is on another GPU than torch's current one" in texts[1]
        assert texts[2:] == ["2.0", "2.0", f"[{THEIRS}, 0]"]
