# SPDX-License-Identifier: Apache-2.0
"""What several files of this folder share."""

from collections.abc import Iterator

import pytest

from fake_driver import Driver, fake_driver


@pytest.fixture
def driver() -> Iterator[Driver]:
    """A CUDA driver made of dictionaries."""
    with fake_driver() as fake:
        yield fake
