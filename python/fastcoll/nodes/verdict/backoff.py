# SPDX-License-Identifier: Apache-2.0
"""Waiting by polling, with growing pauses, for an event that wakes no thread.

Decides the pauses. Must not know the event.
"""

import time
from collections.abc import Callable

from fastcoll.bootstrap.deadline import Deadline

LOOK_EVERY_S = 0.1  # for a verdict: each look is a question to the store
FIRST_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 1e-3


def wait_until(
    condition: Callable[[], bool],
    check: Callable[[], None],
    deadline: Deadline | None = None,
    *,
    first_check_s: float = LOOK_EVERY_S,
    pauses_s: tuple[float, float] = (FIRST_PAUSE_S, LONGEST_PAUSE_S),
) -> bool:
    """Wait until a condition holds; return False if the deadline passed before.

    Args:
        condition: Called again and again.
        check: Called now and then; raises an error that ends the wait from outside.
        deadline: None: `check` alone ends it.
        first_check_s: When `check` is first asked.
        pauses_s: The first pause between two questions, and the longest.
    """
    pause_s, longest_s = pauses_s
    next_look = time.monotonic() + first_check_s
    while not condition():
        if (now := time.monotonic()) >= next_look:
            next_look = now + LOOK_EVERY_S
            check()
        if deadline is not None and deadline.passed():
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return True
