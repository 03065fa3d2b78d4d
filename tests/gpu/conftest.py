# SPDX-License-Identifier: Apache-2.0
"""The tests of groups on GPUs; where there is none, the folder above deselects them.

Ranks are threads of this process (`threads`), which run together even on one GPU, or processes
(`pools` of the folder above), which take turns on it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fastcoll import env
from fastcoll.measure.gpu_ranks import GpuRanks

env.prepare_gpu_threads()
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def placements() -> list[str]:
    return ["one_gpu", "spread"] if torch.cuda.device_count() > 1 else ["one_gpu"]


def kept(placement: str, timeout_s: float = 30.0) -> Iterator[Callable[[int], GpuRanks]]:
    """Groups that live on from test to test, one at a time: each claims its share of the device."""
    made: dict[int, GpuRanks] = {}

    def group(world_size: int) -> GpuRanks:
        if world_size not in made or made[world_size].failed:
            while made:
                made.popitem()[1].close()
            made[world_size] = GpuRanks(devices(placement, world_size), timeout_s)
        return made[world_size]

    yield group
    for ranks in made.values():
        ranks.close()


@pytest.fixture(scope="session", params=placements())
def threads(request: pytest.FixtureRequest) -> Iterator[Callable[[int], GpuRanks]]:
    """`threads(n)` is a group of n rank threads; tests must leave it in order."""
    yield from kept(request.param)


@pytest.fixture(scope="module")
def quick_threads() -> Iterator[Callable[[int], GpuRanks]]:
    """The same on one GPU, and nothing is waited for long."""
    yield from kept("one_gpu", 4.0)


@pytest.fixture
def fresh_threads() -> Iterator[Callable[[int, float], GpuRanks]]:
    """`fresh_threads(n, timeout_s)` is a group for this test alone: it may break it."""
    made: list[GpuRanks] = []

    def group(world_size: int, timeout_s: float) -> GpuRanks:
        made.append(GpuRanks(devices("one_gpu", world_size), timeout_s))
        return made[-1]

    yield group
    for ranks in made:
        ranks.close()


def devices(placement: str, world_size: int) -> list[str]:
    num_gpus = 1 if placement == "one_gpu" else torch.cuda.device_count()
    return [f"cuda:{rank % num_gpus}" for rank in range(world_size)]
