# SPDX-License-Identifier: Apache-2.0
"""A wait for a condition that nobody announces."""

import time
from collections.abc import Callable
from typing import Any

from fastcoll.calls import recorder
from tests.support.harness import DEADLINE_S


def wait_until(condition: Callable[[], Any], limit_s: float = DEADLINE_S) -> Any:
    """Ask until something is true, and return it; AssertionError at the limit."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, f"never true: {condition}"
        time.sleep(0.01)
    return found


def waits(pid: int) -> bool:
    """Whether the flight recorder of a rank says that it waits in a call."""
    newest = [one.operations[-1] for one in recorder.read_process(pid) if one.operations]
    return any(one.state == "waiting" for one in newest)
