# SPDX-License-Identifier: Apache-2.0
"""The fixtures that several files of this folder share."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fastcoll.machine import gpu
from tests.support import harness
from tests.support.fake_driver import Driver, fake_driver


@pytest.fixture
def driver() -> Iterator[Driver]:
    """A CUDA driver made of dictionaries."""
    with fake_driver() as fake:
        yield fake


@pytest.fixture
def report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path], str]:
    """`report(folder)` is what the report on a folder prints; its files go to folder/out."""
    module = importlib.import_module("report")
    one = gpu.Gpu(0, "Some GPU", "id", 90, 132, True, True)
    monkeypatch.setattr(gpu, "gpus", lambda: [one])

    def run(folder: Path) -> str:
        module.main(folder, folder / "out")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def triton_pools() -> Iterator[harness.Pools]:
    """`triton_pools(n)` are n ranks, `triton_pools("aab")` some of two nodes.

    Their Triton kernels run by its interpreter.
    """

    def start(kind: Any) -> harness.Pool:
        world, nodes = (kind, "") if isinstance(kind, int) else (len(kind), kind)
        return harness.Pool(world, harness.Setup(env={"TRITON_INTERPRET": "1"}, nodes=nodes))

    with closing(harness.Pools(start)) as pools:
        yield pools
