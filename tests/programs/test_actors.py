# SPDX-License-Identifier: Apache-2.0
"""Ray's actors and Ray Train on fastcoll."""

import sys
from pathlib import Path

import pytest

from tests.programs.run import need_package, run_alone

ACTORS = "tests.programs.actors"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]


def expected(rank: int) -> dict[str, list[float]]:
    ones = [1.0] * 3
    twos, threes = [2.0] * 3, [3.0] * 3
    return {
        "sum": threes,
        "max": twos,
        "reduce": threes if rank == 1 else ones,
        "broadcast": twos,
        "gathered": ones + twos,
        "scattered": [2.0 * (rank + 1)] * 3,
        "received": twos if rank == 0 else ones,
    }


def test_actors_call_each_collective(tmp_path: Path) -> None:
    need_package("ray")
    found = run_alone(f"{ACTORS}:collectives", folder=tmp_path)
    assert found == [[expected(rank) for rank in (0, 1)]] * 3


def test_ray_train_finds_the_backend(tmp_path: Path) -> None:
    need_package("ray")
    found = run_alone(f"{ACTORS}:train", folder=tmp_path)
    assert found == {"same": True, "ranks": 2}


def test_a_ray_that_takes_no_backends_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    need_package("ray")
    import fastcoll
    from fastcoll.integrations import ray_collective

    monkeypatch.setitem(sys.modules, "ray.util.collective.backend_registry", None)
    with pytest.raises(fastcoll.UnsupportedError, match=ray_collective.TESTED):
        ray_collective.register()
