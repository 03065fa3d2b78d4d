# SPDX-License-Identifier: Apache-2.0
"""A wait for a condition that nobody announces."""

import time
from collections.abc import Callable
from typing import Any

from tests.support.harness import DEADLINE_S


def wait_until(condition: Callable[[], Any], limit_s: float = DEADLINE_S) -> Any:
    """Ask until something is true, and return it; AssertionError at the limit."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, f"never true: {condition}"
        time.sleep(0.01)
    return found
