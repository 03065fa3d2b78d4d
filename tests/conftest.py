# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every folder of tests shares."""

from collections.abc import Callable, Iterator

import pytest

import harness


@pytest.fixture(scope="session")
def pools() -> Iterator[harness.Pools]:
    """`pools(n)` is the session's pool of n ranks; tests must leave its group in order."""
    result = harness.Pools()
    yield result
    result.close()


@pytest.fixture
def fresh_pool() -> Iterator[Callable[..., harness.Pool]]:
    """`fresh_pool(n, setup)` starts ranks for this test alone: it may break them."""
    opened: list[harness.Pool] = []

    def start(world_size: int, setup: harness.Setup | None = None) -> harness.Pool:
        opened.append(harness.Pool(world_size, setup))
        return opened[-1]

    yield start
    for pool in opened:
        pool.close()
