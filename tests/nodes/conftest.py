# SPDX-License-Identifier: Apache-2.0
"""Ranks on several nodes, which FASTCOLL_NODE_ID makes of one machine."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.harness import Pool, Setup


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[[str], Pool]]:
    """`clusters("aab")` is the session's pool of ranks 0 and 1 on node a and rank 2 on node b."""
    pools: dict[str, Pool] = {}

    def get(nodes: str) -> Pool:
        if nodes not in pools or not pools[nodes].is_open:
            pools[nodes] = Pool(len(nodes), Setup(nodes=nodes))
        return pools[nodes]

    yield get
    for pool in pools.values():
        pool.close()
