# SPDX-License-Identifier: Apache-2.0
"""One limit for a task of several waits.

Decides how much time counts: not the time in which this process did not run. A job that stands
still as a whole (a paused container, a suspended machine) is no rank's fault. If one rank alone
stands still, its peers go on counting and name it. csrc/cpu/wait.h does the same for C++.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# A wait looks at the clock this often, so that a longer time between two looks was not waited.
# Python runs signal handlers between two slices, too. A signal that another thread takes, or that
# comes just before the system call, does not end that call. So no wait may be one long call.
_SLICE_S = 0.1
# The most that counts of a longer time. On a loaded machine that runs a waiting thread only every T
# seconds a limit takes T / 0.5 s times as long.
_MOST_S = 0.5


class _RunningClock:
    """The seconds that this process ran while a thread looked at the clock."""

    def __init__(self) -> None:
        self._seen_s = time.monotonic()
        self._running_s = 0.0
        self.forget_lock()
        os.register_at_fork(after_in_child=self.forget_lock)

    def forget_lock(self) -> None:
        """Take a new lock: a forked child may have its parent's, held by a thread it has not."""
        self._lock = threading.RLock()  # a signal handler may come here, too

    def now_s(self) -> float:
        with self._lock:
            time_s = time.monotonic()
            self._running_s += min(time_s - self._seen_s, _MOST_S)
            self._seen_s = time_s
            return self._running_s


running_s = _RunningClock().now_s


class Flag:
    """An event that threads wait for, and signal handlers that interrupt them.

    The lock within a threading.Event may be held by the code that a handler has interrupted. Here a
    thread that has passed may hold the gate, and all others see that it is open.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def set(self) -> None:
        """Let all threads pass; to be called once."""
        self._is_set = True
        self._gate.release()

    def is_set(self) -> bool:
        """Return whether threads may pass."""
        return self._is_set

    def wait(self, limit_s: float) -> bool:
        """Wait at most so many seconds; return whether threads may pass."""
        if not self._is_set and self._gate.acquire(timeout=limit_s):
            self._gate.release()
        return self._is_set


class Deadline:
    """The end of a number of seconds in which this process runs; it may be infinite."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end_s = running_s() + limit_s

    def left_s(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(0.0, self._end_s - running_s())

    def passed(self) -> bool:
        """Return whether nothing is left."""
        return self.left_s() == 0.0

    def wait(self, wait_s: Callable[[float], T]) -> T:
        """Wait until `wait_s(seconds)` returns something true, or nothing is left.

        Returns:
            The last result of `wait_s`.
        """
        while True:
            left_s = self.left_s()
            if (result := wait_s(min(left_s, _SLICE_S))) or left_s == 0:
                return result
