# SPDX-License-Identifier: Apache-2.0
"""Programs of torch.distributed on one backend or another, and whether they did the same."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import Rank

Program = Callable[..., Any]
COMPILE_S = 400.0  # alone it takes 15 s; ranks that come second wait for the first
# A rank may be compiling when its pool is asked for the first time.
IS_COMPILED = [pytest.mark.native, pytest.mark.timeout(2 * COMPILE_S)]
# Values of FASTCOLL_TORCH_BACKEND for a test of both backends.
BACKENDS = ["python", pytest.param("compiled", marks=IS_COMPILED)]


def on_backend(rank: Rank, backend: str, program: Program, *args: Any) -> Any:
    """Run a program inside a process group of its own."""
    import fastcoll  # registers the backend

    number = rank.store.add(f"{program.__name__}/{rank.rank}", 1)
    store = dist.PrefixStore(f"{program.__name__}/{number}", rank.store)
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world_size)
    try:
        return program(rank, *args)
    finally:
        fastcoll.destroy()  # also what was made for groups of Gloo
        dist.destroy_process_group()


def in_cpp(rank: Rank) -> tuple[str, str]:
    """Return the backend that torch calls, and the reason if it is not the compiled one."""
    from fastcoll.integrations import c10d_build

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return type(backend).__name__, c10d_build.reason()


@contextlib.contextmanager
def no_caches(compiler: str) -> Iterator[None]:
    """Let inductor compile everything anew: what it keeps on disk hides what has changed."""
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
