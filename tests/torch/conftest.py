# SPDX-License-Identifier: Apache-2.0
"""Ranks that are without a group, for tests that make one as a program would."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.backends import BACKENDS, COMPILE_S, in_cpp, on_backend
from tests.support.harness import Pool, Setup


@pytest.fixture(scope="package")
def bare_pools() -> Iterator[Callable[[int], Pool]]:
    """`bare_pools(n)` is this folder's pool of n ranks that have made no group."""
    yield from _pools(lambda world_size: Pool(world_size, Setup(init=False)))


@pytest.fixture(scope="package")
def compiled_pools() -> Iterator[Callable[[int], Pool]]:
    """As `bare_pools`, of ranks whose groups of torch use the compiled backend."""

    def start(world_size: int) -> Pool:
        pool = Pool(world_size, Setup(init=False, env={"FASTCOLL_TORCH_BACKEND": "compiled"}))
        rows = pool.run(on_backend, "fastcoll", in_cpp, deadline_s=COMPILE_S)
        assert rows == [("FastcollBackend", "")] * world_size
        return pool

    yield from _pools(start)


@pytest.fixture(params=BACKENDS)
def backend_pools(request: pytest.FixtureRequest) -> Callable[[int], Pool]:
    """As `bare_pools`, once for the Python backend and once for the compiled one."""
    name = "bare_pools" if request.param == "python" else "compiled_pools"
    pools: Callable[[int], Pool] = request.getfixturevalue(name)
    return pools


def _pools(start: Callable[[int], Pool]) -> Iterator[Callable[[int], Pool]]:
    opened: dict[int, Pool] = {}

    def pool(world_size: int) -> Pool:
        if world_size not in opened or not opened[world_size].is_open:
            opened[world_size] = start(world_size)
        return opened[world_size]

    yield pool
    for one in opened.values():
        one.close()
