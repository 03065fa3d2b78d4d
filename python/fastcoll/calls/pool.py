# SPDX-License-Identifier: Apache-2.0
"""The process's worker threads of Python.

Decides how many there are and when they end. Must not know their tasks.

They are daemons, as `concurrent.futures` joins its threads before any handler of `atexit` runs. A
receive without a sender would then keep the process alive up to its limit.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from fastcoll.errors import FastcollError

_LOOK_S = 0.001  # between two looks of the thread that waits for all tasks


class _Pool:
    """Some threads; an idle one takes the next task.

    Never all busy: a group that waited for a thread would keep its peers waiting for it.

    A signal handler may come here, too, and wait for its task: no thread needs the lock between
    the task's submission and its end. Python runs handlers where a function begins, behind a call
    and at a jump back. So none comes between a task's count and its `put`.
    """

    def __init__(self) -> None:
        self.forget()
        # A forked child has none of the threads.
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self._lock = threading.RLock()
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._num_idle = self._num_open = 0
        self._generation = 0  # of the threads that stay when they are idle
        self._is_ended = False

    def submit(self, task: Callable[[], object]) -> None:
        with self._lock:
            if self._is_ended:
                raise RuntimeError("the interpreter ends")
            if self._num_idle:
                self._num_idle -= 1
            else:
                run_tasks = partial(self._run_tasks, self._generation)
                threading.Thread(target=run_tasks, name="fastcoll", daemon=True).start()
            self._num_open += 1
            self._tasks.put(task)

    def close(self) -> None:
        with self._lock:
            self._generation += 1
            num_idle, self._num_idle = self._num_idle, 0
            for _ in range(num_idle):
                self._tasks.put(None)

    def end(self) -> None:
        while self._num_open:
            time.sleep(_LOOK_S)
        with self._lock:
            self._is_ended = True

    def _run_tasks(self, generation: int) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            finally:
                del task  # what it holds goes before it counts as over
                with self._lock:
                    self._num_open -= 1
            with self._lock:
                if generation != self._generation:
                    return
                self._num_idle += 1


_pool = _Pool()
_before_end: list[Callable[[], object]] = []


def close_pool() -> None:
    """Let the worker threads end when their work is done; new work starts new ones."""
    _pool.close()


def before_end(prepare: Callable[[], object]) -> None:
    """Call this at exit, before all tasks are waited for; it ends those that may go on for long."""
    _before_end.append(prepare)


def end_pool() -> None:
    """Wait at exit until all tasks are over; each has a limit. From here on there are no threads.

    A module that ends something that tasks use puts this behind it: the parts of fastcoll end in
    the opposite order.
    """
    while _before_end:
        _before_end.pop()()
    _pool.end()


def run_in_pool(task: Callable[..., object], *args: object) -> None:
    """Run a task in a thread of the process's pool.

    Raises:
        FastcollError: There is no thread for it, as when the interpreter ends; it will not run.
    """
    try:
        _pool.submit(partial(task, *args))
    except RuntimeError as error:
        raise FastcollError(f"no thread for an asynchronous call: {error}") from error
