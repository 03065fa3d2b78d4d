# SPDX-License-Identifier: Apache-2.0
"""The process's worker threads of Python.

Decides how many there are and when they end. Must not know their tasks.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fastcoll.errors import FastcollError


class _Pool:
    """The process's worker threads, started when there is work for them.

    Never all busy: a group that waited for a thread would keep its peers waiting for it.
    """

    _MAX_THREADS = 4096

    def __init__(self) -> None:
        self.forget()
        # A forked child has none of the threads.
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def submit(self, task: Callable[..., object], *args: object) -> None:
        claim = threading.Lock()

        def run() -> None:
            if claim.acquire(blocking=False):
                task(*args)

        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._MAX_THREADS, "fastcoll")
            try:
                self._executor.submit(run)
            except RuntimeError:
                # The executor keeps a task for which it could start no thread. No thread may run it
                # later, unless an idle one has begun to.
                if claim.acquire(blocking=False):
                    raise

    def close(self) -> None:
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown(wait=False)
            self._executor = None


_pool = _Pool()


def close_pool() -> None:
    """Let the worker threads end when their work is done; new work starts new ones."""
    _pool.close()


def run_in_pool(task: Callable[..., object], *args: object) -> None:
    """Run a task in a thread of the process's pool.

    Raises:
        FastcollError: There is no thread for it, as when the interpreter ends; it will not run.
    """
    try:
        _pool.submit(task, *args)
    except RuntimeError as error:
        raise FastcollError(f"no thread for an asynchronous call: {error}") from error
