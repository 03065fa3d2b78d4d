# SPDX-License-Identifier: Apache-2.0
"""One limit for a task of several waits."""

import time


class Deadline:
    """A point in time that a task of several waits must not pass."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        """Return whether nothing is left."""
        return self.left_s() == 0.0
