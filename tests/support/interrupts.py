# SPDX-License-Identifier: Apache-2.0
"""Signal handlers that run at one certain step of a program, and not by chance.

Decides where: Python runs handlers where a function begins and where a call of C has returned. (It
does so at jumps back, too.) A profile function is told of these steps. Must not know the library.

Python 3.14 runs handlers behind `__enter__`, too, where a `with` statement does not yet leave the
lock that it took (python/cpython issue 148874). These steps are left out: Python's own locks, of
threads and events, are not safe there either.
"""

import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.support.harness import DEADLINE_S


class _Step:
    """Does something at a step with a number."""

    def __init__(self, number: int, act: Callable[[], object], where: str) -> None:
        self.num_left = number
        self._act = act
        self._where = where

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "c_return") or self._where not in frame.f_code.co_filename:
            return
        if event == "c_return" and arg.__name__ == "__enter__":
            return
        self.num_left -= 1
        if self.num_left == -1:
            sys.setprofile(None)
            self._act()


def interrupted(
    task: Callable[[], object], act: Callable[[], object], number: int, where: str = ""
) -> bool:
    """Do a task, and something else at its step with a number; return whether it has that step.

    Steps count in files with `where` in their names.
    """
    step = _Step(number, act, where)
    sys.setprofile(step)
    try:
        task()
    except KeyboardInterrupt:
        assert step.num_left < 0
    finally:
        sys.setprofile(None)
    return step.num_left < 0


def at_each_step(check: Callable[[int], bool]) -> None:
    """Check each step of a task, until `check` returns that there is none with that number."""
    num_steps = next(number for number in itertools.count() if not check(number))
    assert num_steps > 1


def within_deadline(task: Callable[[], object]) -> None:
    """Do something that would wait for ever if it were broken."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
