# SPDX-License-Identifier: Apache-2.0
"""Ranks on several nodes, which FASTCOLL_NODE_ID makes of one machine."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import Pool, Setup

ROOT = Path(__file__).parents[2]
# The calls and their oracle, and torch's programs, are those of one node.
sys.path += [str(ROOT / folder) for folder in ("tests/collectives", "tests/integrations", "bench")]


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
