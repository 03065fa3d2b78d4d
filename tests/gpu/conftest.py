# SPDX-License-Identifier: Apache-2.0
"""The tests of groups on GPUs; where there is none, the folder above deselects them.

Ranks are threads of this process (`threads`), which run together even on one GPU. Or they are
processes (`pools` of the folder above), which take turns on it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastcoll.measure.gpu_ranks import GpuRanks
from tests.support.gpu import ThreadGroups, start_threads
from tests.support.sites import placements

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", params=placements())
def threads(
    request: pytest.FixtureRequest, thread_groups: ThreadGroups
) -> Callable[[int], GpuRanks]:
    """`threads(n)` is a group of n rank threads; tests must leave it in order."""
    return lambda world_size: thread_groups(request.param, world_size)


@pytest.fixture(scope="session")
def quick_threads(thread_groups: ThreadGroups) -> Callable[[int], GpuRanks]:
    """The same on one GPU, and nothing is waited for long."""
    return lambda world_size: thread_groups("one_gpu", world_size, 4.0)


@pytest.fixture
def fresh_threads() -> Iterator[Callable[[int, float], GpuRanks]]:
    """`fresh_threads(n, timeout_s)` is a group for this test alone: it may break it."""
    made: list[GpuRanks] = []

    def group(world_size: int, timeout_s: float) -> GpuRanks:
        made.append(start_threads("one_gpu", world_size, timeout_s))
        return made[-1]

    yield group
    for ranks in made:
        ranks.close()
