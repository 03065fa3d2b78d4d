# SPDX-License-Identifier: Apache-2.0
"""One thread of a process makes a group; the others that want the same group wait for it.

Decides which thread makes a group and which threads wait. The lock guards the table alone and is
never held while a group is made. Making is collective: two threads may make two groups in one order
here, and in the other order on a peer. Must not know the groups.
"""

import os
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from fastcoll.bootstrap.deadline import Deadline, Flag
from fastcoll.errors import CollectiveTimeout, FastcollError, UsageError


class _Making:
    """A group that a thread is making."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.over = Flag()
        self.error: Exception | None = None

    def fail(self, error: BaseException) -> None:
        """Keep the error for the waiting threads; a UsageError is about one thread's arguments."""
        if isinstance(error, Exception):
            self.error = None if isinstance(error, UsageError) else error
        else:
            reason = f"another thread was interrupted while it made the group: {error!r}"
            self.error = FastcollError(reason)

    def wait(self, name: str, deadline: Deadline) -> None:
        """Wait until the other thread is done; raise its error."""
        if self.thread == threading.get_ident():
            raise UsageError(
                f'"{name}" is being made by this thread, which a signal handler has interrupted: '
                "the handler can't use the group; it may set a flag for the program to look at"
            )
        if not deadline.wait(self.over.wait):
            raise CollectiveTimeout(
                f'waited {deadline.limit_s:g} s for another thread, which is making "{name}"'
            )
        if self.error is not None:
            raise self.error


class Makers:
    """The groups of this process that threads are making now."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Begin anew: a forked child has none of the threads, and perhaps the lock of one."""
        self._lock = threading.RLock()  # a signal handler may come here, too
        self._open: dict[Hashable, _Making] = {}

    def is_busy(self, key: Hashable) -> bool:
        """Return whether a thread makes a group just now."""
        return key in self._open

    @contextmanager
    def hold(self, key: Hashable, name: str, limit_s: float) -> Iterator[None]:
        """Be the one thread that makes a group. Its error is raised in the threads that wait.

        Args:
            key: Which group.
            name: The group's name in the text of an error.
            limit_s: Limit of the wait for another thread, in seconds.

        Raises:
            CollectiveTimeout: Another thread did not get through in time.
            UsageError: The caller is a signal handler that has interrupted the maker.
            FastcollError: The other thread's error.
        """
        mine, deadline = _Making(), Deadline(limit_s)
        try:
            while (making := self._join_making(key, mine)) is not mine:
                making.wait(name, deadline)
            yield
        except BaseException as error:
            mine.fail(error)
            raise
        finally:
            with self._lock:
                if self._open.get(key) is mine:
                    del self._open[key]
            mine.over.set()

    def _join_making(self, key: Hashable, mine: _Making) -> _Making:
        """Return the making in progress: `mine`, if there was none."""
        with self._lock:
            return self._open.setdefault(key, mine)
