# SPDX-License-Identifier: Apache-2.0
"""Calls that may never return: a store behind a cut link, an MPI whose ranks are missing.

Decides in which threads they run: daemons, which no process waits for when it ends. Must not know
the calls.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.errors import FastcollError
from fastcoll_autoload.ends import at_the_end

T = TypeVar("T")
# Time for a thread to end after its call. A thread that returns while the interpreter ends would
# take the process down. So threads that are about to return may do so first.
_LAST_S = 1.0
_asking: "weakref.WeakSet[threading.Thread]"
_lock: threading.RLock


def _forget() -> None:
    """Begin anew: a forked child has none of the threads, and perhaps the lock of one of them."""
    global _asking, _lock
    # A signal handler may come here, too.
    _asking, _lock = weakref.WeakSet(), threading.RLock()


_forget()
os.register_at_fork(after_in_child=_forget)


def in_background(task: Callable[[], object]) -> None:
    """Do something in a thread that keeps no process from ending; it handles its own errors.

    Raises:
        FastcollError: There is no thread for it.
    """
    thread = threading.Thread(target=task, name="fastcoll-question", daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise FastcollError(f"no thread for a question: {error}") from error
    with _lock:
        _asking.add(thread)


def ask(question: Callable[[], T], limit_s: float) -> T:
    """Return the answer to a question that can't be given a limit.

    Without room for a thread, which takes 8 MiB of addresses, the question runs in this thread.

    Raises:
        TimeoutError: There was none in time; the question goes on in its thread.
        Exception: The question's own error.
    """
    answers: list[T] = []
    errors: list[Exception] = []
    answered = threading.Event()

    def run() -> None:
        try:
            answers.append(question())
        except Exception as error:
            errors.append(error)
        finally:
            answered.set()

    try:
        in_background(run)
    except FastcollError:
        run()
    if not Deadline(limit_s).wait(answered.wait):
        raise TimeoutError(f"no answer within {limit_s:g} s")
    if errors:
        raise errors[0]
    return answers[0]


def _join_threads() -> None:
    deadline = Deadline(_LAST_S)
    with _lock:
        asking = list(_asking)
    for thread in asking:
        thread.join(deadline.left_s())


at_the_end.append(_join_threads)
