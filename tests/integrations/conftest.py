# SPDX-License-Identifier: Apache-2.0
"""Ranks that are without a group, for tests that make one as a program would."""

from collections.abc import Callable, Iterator

import pytest

from harness import Pool, Setup


@pytest.fixture(scope="package")
def bare_pools() -> Iterator[Callable[[int], Pool]]:
    """`bare_pools(n)` is this folder's pool of n ranks that have made no group."""
    opened: dict[int, Pool] = {}

    def pool(world_size: int) -> Pool:
        if world_size not in opened or not opened[world_size].is_open:
            opened[world_size] = Pool(world_size, Setup(init=False))
        return opened[world_size]

    yield pool
    for one in opened.values():
        one.close()
