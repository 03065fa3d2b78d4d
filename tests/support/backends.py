# SPDX-License-Identifier: Apache-2.0
"""Programs of torch.distributed on one backend or another, and whether they did the same."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll  # registers the backend
from fastcoll.api.groups import communicator_of
from fastcoll.integrations import c10d_build
from tests.support.harness import Rank

Program = Callable[..., Any]
COMPILE_S = 400.0  # alone it takes 15 s; ranks that come second wait for the first
# A rank may be compiling when its pool is asked for the first time.
IS_COMPILED = [pytest.mark.native, pytest.mark.timeout(2 * COMPILE_S)]
# Values of FASTCOLL_TORCH_BACKEND for a test of both backends.
BACKENDS = ["python", pytest.param("compiled", marks=IS_COMPILED)]


def on_backend(rank: Rank, backend: str, program: Program, *args: Any) -> Any:
    """Run a program inside a process group of its own, on ranks that have made no group."""
    if fastcoll.is_initialized():  # the end of this call would close it under the tests to come
        raise AssertionError("on_backend needs a pool of Setup(init=False)")
    number = rank.store.add(f"{program.__name__}/{rank.rank}", 1)
    store = dist.PrefixStore(f"{program.__name__}/{number}", rank.store)
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world_size)
    try:
        return program(rank, *args)
    finally:
        fastcoll.destroy()  # also the groups made for groups of Gloo
        dist.destroy_process_group()


def renew_group(rank: Rank, backend: str) -> None:
    """End the default groups; make one of torch's on a backend, by the name of the first."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    fastcoll.destroy()
    dist.destroy_process_group()
    store = dist.PrefixStore(str(rank.store.add(f"renewed/{rank.rank}", 1)), rank.store)
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world_size)
    assert dist.group.WORLD.group_name == name  # type: ignore[union-attr]


class TorchGroup:
    """A group of torch.distributed, with the verbs as a Communicator's methods have them."""

    def __init__(self, rank: int, world_size: int, group: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group = group  # None is the default group

    def __getattr__(self, verb: str) -> Any:
        function = getattr(dist, verb)
        return function if self.group is None else functools.partial(function, group=self.group)

    def new_group(self) -> "TorchGroup":
        """Make a group of all ranks."""
        return TorchGroup(self.rank, self.world_size, dist.new_group())

    def set_timeout(self, limit_s: float) -> None:
        """Set the limit of calls."""
        self.group.set_timeout(timedelta(seconds=limit_s))

    def communicator(self) -> Any:
        """Return the group of fastcoll's that carries out the calls."""
        return communicator_of(self.group)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self.group)

    def all_reduce_coalesced(self, tensors: Sequence[torch.Tensor], *op: Any, **how: Any) -> Any:
        return _in_one(dist.all_reduce, [(tensor, *op) for tensor in tensors], **how)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *op: Any, **how: Any
    ) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return _in_one(dist.reduce_scatter_tensor, [(*pair, *op) for pair in pairs], **how)

    def all_gather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], **how: Any
    ) -> Any:
        pairs = list(zip(outputs, inputs, strict=True))
        return _in_one(dist.all_gather_into_tensor, pairs, **how)

    def batch_isend_irecv(self, ops: Sequence[Any]) -> Any:
        """Make a batch of torch's of one of fastcoll's."""
        return dist.batch_isend_irecv(
            [dist.P2POp(getattr(dist, op.op), op.tensor, op.peer, tag=op.tag) for op in ops]
        )


def _in_one(call: Callable[..., Any], cases: list[Any], async_op: bool = False) -> Any:
    """Let torch make one call of several."""
    with dist._coalescing_manager(async_ops=async_op) as manager:
        for arguments in cases:
            call(*arguments)
    return manager if async_op else None


def on_torch(rank: Rank, program: Program, *args: Any) -> Any:
    """Run a program whose group is torch's, on the backend "fastcoll"."""
    return on_backend(rank, "fastcoll", _in_torch_group, program, *args)


def _in_torch_group(rank: Rank, program: Program, *args: Any) -> Any:
    group = TorchGroup(rank.rank, rank.world_size)
    return program(dataclasses.replace(rank, comm=group), *args)


def in_cpp(rank: Rank) -> tuple[str, str]:
    """Return the backend that torch calls, and the reason if it is not the compiled one."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return type(backend).__name__, c10d_build.reason()


@contextlib.contextmanager
def no_caches(compiler: str) -> Iterator[None]:
    """Let inductor compile everything anew: its cache on disk would hide changes."""
    if compiler != "inductor":
        yield
        return
    from torch._inductor import config

    with config.patch(force_disable_caches=True):
        yield


def same(one: Any, other: Any) -> bool:
    """Return whether results are equal, tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
