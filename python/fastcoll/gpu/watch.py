# SPDX-License-Identifier: Apache-2.0
"""The thread of a process that watches over its groups on GPUs.

A program waits for its device, and then makes no call in which a lost or late rank would show. So a
thread looks: a lost rank ends the kernels' waits within a second, and a late one is logged long
before the limit. Decides when it looks, and when the thread begins and ends. Must not know kernels.
"""

import os
import threading
import weakref
from typing import Protocol

from fastcoll.errors import FastcollError

_LOOK_S = 0.25


class Watched(Protocol):
    """A group, as far as the thread has to know it."""

    def look(self) -> None:
        """Look after the kernels that run; may raise the group's error."""


class Watcher:
    """The groups that are watched; a thread runs as long as there are some."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._looking = threading.RLock()  # held for a look at one group
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, group: Watched) -> None:
        """Watch over a group.

        Raises:
            FastcollError: The process can't have another thread.
        """
        with self._lock:
            self._groups.add(group)
            self._changed.clear()
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._watch, name="fastcoll-gpus", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._groups.discard(group)
                raise FastcollError(f"no thread to watch a group on GPUs: {error}") from error
            self._thread = thread

    def remove(self, group: Watched) -> None:
        """Let go of a group; when this returns no other thread looks at it any more."""
        with self._lock:
            self._groups.discard(group)
            if not self._groups:
                self._changed.set()
        with self._looking:
            pass

    def _watch(self) -> None:
        while self._look():
            self._changed.wait(_LOOK_S)

    def _look(self) -> bool:
        """Look at every group; return False, for good, if there is none. Keeps none alive."""
        with self._lock:
            groups = list(self._groups)
            if not groups:
                self._thread = None
        for group in groups:
            with self._looking:
                self._look_at(group)
        return bool(groups)

    def _look_at(self, group: Watched) -> None:
        with self._lock:
            if group not in self._groups:
                return
        try:
            group.look()
        except FastcollError:  # the next call raises it, too
            self.remove(group)


watcher = Watcher()


def _forget_groups() -> None:
    """Begin anew in a forked child, which has none of its parent's threads."""
    watcher.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget_groups)
