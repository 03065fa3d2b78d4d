# SPDX-License-Identifier: Apache-2.0
"""FASTCOLL_TORCH_BACKEND holds for the groups made from then on, whatever was imported before."""

import importlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll import env
from tests.support.backends import COMPILE_S, in_cpp, no_caches, on_backend
from tests.support.harness import Attempt, Pool, Rank, Setup, attempt

# A rank may be compiling when its pool is asked for the first time.
pytestmark = [pytest.mark.native, pytest.mark.timeout(2 * COMPILE_S)]
OPS = "fastcoll.integrations.ops"
CLASSES = {
    "python": "ProfiledProcessGroup",
    "compiled": "FastcollBackend",
    "auto": "FastcollBackend",  # the process has it by then
}


def values(rank: Rank) -> tuple[str, list[float]]:
    """Return the class of torch's backend, and sums by eager calls and by a compiled one."""
    mine = torch.full((40,), rank.rank + 1.0)
    eager, ours = mine.clone(), mine.clone()
    dist.all_reduce(eager)
    fastcoll.all_reduce(ours, group=dist.group.WORLD)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def summed(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        fastcoll.all_reduce(x, group=dist.group.WORLD)
        return x

    found = [eager, ours]
    with no_caches("inductor"):
        found += [summed(mine) for _ in range(3)]  # from the second one on its plan is known
    return in_cpp(rank)[0], [float(tensor.sum()) / tensor.numel() for tensor in found]


def direct_kinds() -> set[str]:
    """Return the types of what compiled code calls for the operators that C++ has."""
    direct = torch.ops.fastcoll.direct
    return {type(getattr(direct, name)).__name__ for name in ("all_reduce", "all_gather")}


def choose(rank: Rank, settings: list[str]) -> list[Any]:
    """Import the operators at the first setting; make a group at each of the others."""
    assert OPS not in sys.modules
    os.environ[env.TORCH_BACKEND.name] = settings[0]
    importlib.import_module("torch._dynamo")
    assert OPS in sys.modules
    found: list[Any] = []
    for setting in settings[1:]:
        os.environ[env.TORCH_BACKEND.name] = setting
        found.append((*on_backend(rank, "fastcoll", values), direct_kinds()))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        ("compiled", "python"),
        ("python", "compiled"),
        ("python", "python", "compiled", "python", "auto"),
    ],
    ids="-".join,
)
def test_a_group_gets_what_is_set_when_it_is_made(
    fresh_pool: Callable[..., Pool], settings: list[str]
) -> None:
    pool = fresh_pool(2, Setup(init=False))
    rows = pool.run(choose, settings, deadline_s=COMPILE_S)
    wanted = []
    has_compiled = settings[0] != "python"
    for setting in settings[1:]:
        has_compiled = has_compiled or setting != "python"
        # Compiled code calls C++ from when on it is there.
        kinds = {"builtin_function_or_method" if has_compiled else "OpOverload"}
        wanted.append((CLASSES[setting], [3.0] * 5, kinds))
    assert rows == [wanted] * 2


def split_later(rank: Rank) -> list[Any]:
    os.environ[env.TORCH_BACKEND.name] = "python"
    world: Any = dist.group.WORLD
    part = world.split_group([0, 1], timeout=timedelta(seconds=20), group_name="part")
    new = dist.new_group()
    found: list[Any] = [in_cpp(rank)[0]]
    for group in (part, new):
        tensor = torch.full((3,), rank.rank + 1.0)
        group.allreduce([tensor]).wait()
        backend = group._get_backend(torch.device("cpu"))
        found.append((type(backend).__name__, tensor.tolist()))
    return found


def test_a_part_is_as_its_whole(fresh_pool: Callable[..., Pool]) -> None:
    """Torch takes no group of Python as a part of a backend in C++."""
    pool = fresh_pool(2, Setup(init=False, env={env.TORCH_BACKEND.name: "compiled"}))
    rows = pool.run(on_backend, "fastcoll", split_later, deadline_s=COMPILE_S)
    ours, pythons = ((CLASSES[name], [3.0] * 3) for name in ("compiled", "python"))
    assert rows == [[CLASSES["compiled"], ours, pythons]] * 2


def misspelt(rank: Rank) -> list[Any]:
    """Make groups at a value that there is not, and at one that there is."""
    found: list[Any] = []
    for setting in ("compiled", "pyhton", "pyhton", "python"):
        os.environ[env.TORCH_BACKEND.name] = setting
        one = attempt(on_backend, rank, "fastcoll", in_cpp)
        found.append((one.kind, one.text))
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def test_a_value_that_there_is_not_is_an_error_each_time(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2, Setup(init=False))
    for found in pool.run(misspelt, deadline_s=COMPILE_S):
        kinds, texts = zip(*found, strict=True)
        assert kinds == ("", "UsageError", "UsageError", "")
        assert all("FASTCOLL_TORCH_BACKEND='pyhton'" in text for text in texts[1:3])


def test_such_a_value_is_an_error_over_nodes_too(fresh_pool: Callable[..., Pool]) -> None:
    env_of_ranks = {env.TORCH_BACKEND.name: "pyhton"}
    pool = fresh_pool(2, Setup(init=False, nodes="ab", env=env_of_ranks))
    for one in pool.run(attempt_group):
        assert one.kind == "UsageError" and "FASTCOLL_TORCH_BACKEND='pyhton'" in one.text, one


def attempt_group(rank: Rank) -> Attempt:
    return attempt(on_backend, rank, "fastcoll", in_cpp)
