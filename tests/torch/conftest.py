# SPDX-License-Identifier: Apache-2.0
"""Ranks for programs that run on both backends of torch."""

import pytest

from tests.support.backends import BACKENDS
from tests.support.harness import Pools


@pytest.fixture(params=BACKENDS)
def backend_pools(request: pytest.FixtureRequest) -> Pools:
    """As `bare_pools`, once for the Python backend and once for the compiled one."""
    name = "bare_pools" if request.param == "python" else "compiled_pools"
    pools: Pools = request.getfixturevalue(name)
    return pools
