# SPDX-License-Identifier: Apache-2.0
"""torchft's groups and manager have the results that they have on Gloo."""

import sys
from pathlib import Path

import pytest

from tests.programs.run import listed_version, need_package, run_ranks
from tests.support.backends import BACKENDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]


@pytest.mark.parametrize("torch_backend", BACKENDS)
@pytest.mark.parametrize("program", ["reconfigured", "managed"])
def test_replicas_average_as_on_gloo(program: str, torch_backend: str, tmp_path: Path) -> None:
    need_package("torchft")
    on_gloo, ours = (
        run_ranks(
            f"tests.programs.quorums:{program}",
            backend,
            folder=tmp_path,
            torch_backend=torch_backend,
        )
        for backend in ("gloo", "fastcoll")
    )
    assert ours == on_gloo
    assert len(ours[0]) == 3


def test_another_torchft_is_told_the_tested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft.process_group", None)
    monkeypatch.delitem(sys.modules, "fastcoll.integrations.torchft_group", raising=False)
    with pytest.raises(ImportError, match=listed_version("torchft")):
        import fastcoll.integrations.torchft_group  # noqa: F401
