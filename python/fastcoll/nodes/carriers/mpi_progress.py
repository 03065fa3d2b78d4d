# SPDX-License-Identifier: Apache-2.0
"""A thread that polls MPI while this process has lanes of it.

Decides when MPI is polled beside the waits of calls. Must not know the transfers.

A send that MPI calls complete may still lie in a buffer of MPI's: a socket was full. The rest goes
out when this rank polls MPI again. Without this thread that is the rank's next call across nodes.
Two nodes can wait for such a rest while their ranks wait for each other, until the limit. Open
MPI's TCP did so once in 400 calls.
"""

import os
import threading
import time
from typing import Any

from fastcoll.calls.pool import end_pool
from fastcoll_autoload.ends import at_the_end

FIRST_PAUSE_S = 1e-3
# A peer that comes late to a message of before waits this long for the rest at most.
LONGEST_PAUSE_S = 0.1
UNUSED_TAG = 32767  # the largest that every MPI has; no message bears it, so none is found


class MpiProgress:
    """Polls for all lanes of this process; MPI's progress is the process's."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        # Before mpi4py finalises MPI, which no thread may poll afterwards. The pool ends first: its
        # calls may need the thread.
        at_the_end.extend([self._end, end_pool])

    def _reset(self) -> None:
        """Begin anew: a forked child has none of the threads."""
        self._lock = threading.RLock()  # a signal handler may come here, too
        self._communicators: list[Any] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._last_s = 0.0

    def add(self, communicator: Any) -> None:
        """Poll from now on.

        Raises:
            RuntimeError: There is no thread for it.
        """
        with self._lock:
            self._communicators.append(communicator)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="fastcoll-mpi", daemon=True)
                thread.start()
                self._thread = thread

    def note_start(self) -> None:
        """Poll often again: a transfer starts."""
        self._last_s = time.monotonic()
        self._wake.set()

    def remove(self, communicator: Any) -> None:
        """Poll no longer for a communicator, which may be freed then."""
        with self._lock:
            if communicator in self._communicators:
                self._communicators.remove(communicator)

    def _end(self) -> None:
        with self._lock:
            self._communicators.clear()
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            # A tenth of the time since the last start: a late rest costs a tenth more at most.
            age_s = time.monotonic() - self._last_s
            pause_s = min(max(age_s / 10, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            if pause_s < LONGEST_PAUSE_S:
                time.sleep(pause_s)
            elif self._wake.wait(pause_s):
                self._wake.clear()
            with self._lock:
                if not self._communicators:
                    self._thread = None
                    return
                communicator = self._communicators[0]
                try:
                    communicator.Iprobe(tag=UNUSED_TAG)
                except RuntimeError:  # as MPI's are; calls see it themselves
                    time.sleep(LONGEST_PAUSE_S)


PROGRESS = MpiProgress()
