# SPDX-License-Identifier: Apache-2.0
"""Ranks that run Triton kernels by its interpreter; they live as long as the session."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import harness
from tests.triton import ranks
from tests.triton.ranks import Perform, World

# Interpreted kernels on a loaded machine take ten times as long as on an idle one.
DEADLINE_S = 240.0


@pytest.fixture(scope="session")
def interpreters() -> Iterator[Callable[..., Any]]:
    """`interpreters(n)(function, *args)` runs a function on n ranks."""
    pools = []

    @cache
    def start(world_size: int) -> Callable[..., Any]:
        setup = harness.Setup(init=False, env={"TRITON_INTERPRET": "1"})
        pool = harness.Pool(world_size, setup)
        pools.append(pool)
        return lambda *args: pool.run(*args, deadline_s=DEADLINE_S)

    yield start
    for pool in pools:
        pool.close()


@pytest.fixture
def perform(interpreters: Callable[..., Any], new_world: Callable[..., World]) -> Perform:
    """`perform(n, cases)` makes calls on n ranks, in memory of their own."""
    return lambda world, cases: interpreters(world)(ranks.perform, new_world(world), cases)


@pytest.fixture
def new_world(tmp_path: Path) -> Callable[..., World]:
    """`new_world(n, ...)` is zeroed memory for n ranks."""
    return lambda world_size, **options: World(str(tmp_path), world_size, **options)
