# SPDX-License-Identifier: Apache-2.0
"""Asynchronous calls: the handle a user gets, and the queue behind it.

Decides in which thread a call runs that needs Python: first in, first out within a group. A group
with queued calls has at most one thread, from the process's pool. Calls that need no Python are
queued in C++ (csrc/group/call_queue.h). Must not know the verbs.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from math import inf, isnan, prod
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.calls.arrays import Array
from fastcoll.calls.futures import complete
from fastcoll.calls.limits import seconds
from fastcoll.calls.pool import run_in_pool
from fastcoll.errors import CollectiveTimeout, FastcollError, UsageError
from fastcoll.native import _C


def limit_of_wait(timeout: float | timedelta | None) -> float | None:
    """Return the limit of a wait in seconds; as for torch, 0 and less are none.

    Raises:
        UsageError: It is no number of seconds.
    """
    if timeout is None:
        return None
    limit_s = seconds(timeout)
    if isnan(limit_s):
        raise UsageError(f"a wait takes a number of seconds or a timedelta, not {timeout!r}")
    return limit_s if limit_s > 0 else None


class Work:
    """A call that was started with `async_op=True`."""

    __slots__ = ()
    _what: str = "call"  # the name that `repr` shows
    _outputs: list[Array]

    def __repr__(self) -> str:
        state = "not done"
        if self.is_completed():
            state = "failed" if self.exception() else "done"
        return f"<fastcoll.Work {self._what}, {state}>"

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait until the call is complete.

        Args:
            timeout: Seconds to wait here; None, 0 or less wait as long as the call itself may take.

        Returns:
            True.

        Raises:
            FastcollError: The call's error.
            CollectiveTimeout: `timeout` ran out; the call goes on.
        """
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Return whether the call is over, well or not."""
        raise NotImplementedError

    def exception(self) -> Exception | None:
        """Return the call's error; None while it runs or if it went well."""
        raise NotImplementedError

    def is_success(self) -> bool:
        """Return whether the call is over and went well."""
        return self.is_completed() and self.exception() is None

    def result(self) -> list[Array]:
        """Wait, then return the outputs."""
        self.wait()
        return self._outputs

    def num_bytes(self) -> int:
        """Return the size of the outputs."""
        return sum(prod(output.shape) * output.itemsize for output in self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of outputs."""
        raise NotImplementedError


class NativeHandle:
    """The slow parts of a handle whose C++ half waits; a base beside that half."""

    __slots__ = ()
    WHAT = "call"
    _future: torch.futures.Future[Any]

    if TYPE_CHECKING:  # of the other half

        def wait(self, timeout: float | timedelta | None = None) -> bool: ...
        def is_completed(self) -> bool: ...
        def _wait_for(self, seconds: float) -> bool: ...
        def result(self) -> list[Array]: ...

    def _wait(self, timeout: float | timedelta | None = None) -> bool:
        limit_s = limit_of_wait(timeout)
        if not self._wait_for(limit_s or 0):
            text = f"the {self.WHAT} is not complete after {limit_s:g} s; it goes on"
            raise CollectiveTimeout(text)
        return True

    def _is_over_soon(self) -> bool:
        return self.is_completed()

    def is_success(self) -> bool:
        """Return whether it is over and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error; None while it goes on or if it went well."""
        if self.is_completed():
            try:
                self.wait()
            except FastcollError as error:
                return error
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of outputs."""
        is_over = self._is_over_soon()
        with _lock:
            if hasattr(self, "_future"):
                return self._future
            future: torch.futures.Future[Any] = torch.futures.Future()
            if is_over:
                complete(future, self.result)
            else:
                run_in_pool(complete, future, self.result)
            self._future = future  # type: ignore[misc]  # a slot of the heir's
        return future


_lock = threading.Lock()  # of the futures of native handles


class CallWork(_C.CallWork, NativeHandle, Work):
    """A call that C++ carries out without Python."""

    __slots__ = ("__weakref__", "_future")


_C.set_call_work(CallWork)


class QueuedWork(Work):
    """A call that a thread of Python's carries out."""

    def __init__(self, run: Callable[[], None], outputs: list[Array], what: str = "call") -> None:
        self._run: Callable[[], None] | None = run
        self._what = what
        self._outputs = outputs
        self._error: Exception | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._pid = os.getpid()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """See `Work.wait`."""
        limit_s = limit_of_wait(timeout)
        self._refuse_in_child()
        # Without a limit here: the call has its own, and a queue without a thread fails its works.
        deadline = Deadline(limit_s or inf)
        if not deadline.wait(self._done.wait):
            text = f"the call is not complete after {deadline.limit_s:g} s; it goes on"
            raise CollectiveTimeout(text)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the call is over, well or not."""
        return self._done.is_set()

    def exception(self) -> Exception | None:
        """Return the call's error; None while it runs or if it went well."""
        return self._error if self._done.is_set() else None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of outputs."""
        with self._lock:
            if self._future is None:
                self._future = self._new_future()
                if self._done.is_set():
                    complete(self._future, self.result)
            return self._future

    def _new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def _refuse_in_child(self) -> None:
        if self._pid != os.getpid() and not self._done.is_set():
            raise FastcollError(
                f"the call was queued by process {self._pid}, and only there is a thread for it: "
                f"process {os.getpid()} is a fork"
            )

    def _execute(self) -> None:
        """Run the call; the outcome waits for `_finish`."""
        try:
            if self._run is not None:
                self._run()
        except Exception as error:
            self._error = error
        self._run = None  # lets go of the inputs

    def _lose(self, error: BaseException) -> None:
        """Fail a call whose queue lost its thread."""
        self._error = FastcollError(f"the thread of the group's queued calls ended: {error!r}")
        self._error.__cause__ = error
        self._run = None

    def _finish(self) -> list[Callable[[], None]]:
        """End the call; return the completion of its future if no other thread does that."""
        with self._lock:
            self._done.set()
            future = self._future
        if future is None:
            return []
        try:
            # Not in this thread: a callback may start further calls of the group and wait.
            run_in_pool(complete, future, self.result)
        except FastcollError:
            return [partial(complete, future, self.result)]
        return []


def completed(outputs: list[Array], what: str = "call") -> Work:
    """Return the handle of a call that is over."""
    work = QueuedWork(lambda: None, outputs, what)
    work._execute()
    work._finish()
    return work


class _Owner(Protocol):
    """The group whose calls are queued; it is notified when there are any, and of their end."""

    def async_begin(self) -> None: ...

    def async_end(self) -> None: ...

    def await_native(self) -> None: ...

    def idle(self) -> bool: ...


class CallQueue:
    """The calls of one group that need Python, while they wait for their turn."""

    def __init__(self, owner: _Owner) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._waiting: deque[QueuedWork] = deque()
        self._has_thread = False
        self._pid = os.getpid()

    def idle(self) -> bool:
        """Return whether a call may run at once, ahead of nothing."""
        return self._owner.idle()

    def has_calls(self) -> bool:
        """Return whether calls are queued or under way."""
        return bool(self._waiting)

    def submit(self, run: Callable[[], None], outputs: list[Array], what: str = "call") -> Work:
        """Queue a call; `what` is its name."""
        work = QueuedWork(run, outputs, what)
        self.put(work)
        return work

    def put(self, work: QueuedWork) -> None:
        """Queue the call of a handle."""
        with self._lock:
            if not self._has_thread:
                run_in_pool(self._drain)
                self._has_thread = True
            self._owner.async_begin()
            self._waiting.append(work)

    def join(self) -> None:
        """Wait until all queued calls are over, well or not.

        Each call has a limit, and `_drain` fails the calls that it leaves behind. A forked child
        has no thread for its parent's queued calls, so it waits for nothing.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            last = self._waiting[-1] if self._waiting else None
        if last is not None:
            Deadline(inf).wait(last._done.wait)

    def _drain(self) -> None:
        late: list[Callable[[], None]] = []  # futures for which there is no other thread
        try:
            while (work := self._next()) is not None:
                self._owner.await_native()
                work._execute()
                with self._lock:
                    self._waiting.popleft()
                    self._owner.async_end()
                # Only now: a thread that waited for it finds the group idle, and makes its next
                # call without the queue.
                late += work._finish()
        except BaseException as error:
            late += self._lose_all(error)
            raise
        finally:
            # The pool takes no task once the interpreter ends. The queue has no thread any more.
            for complete_future in late:
                complete_future()

    def _next(self) -> QueuedWork | None:
        """Return the call that is to run; None ends the thread."""
        with self._lock:
            self._has_thread = bool(self._waiting)
            return self._waiting[0] if self._waiting else None

    def _lose_all(self, error: BaseException) -> list[Callable[[], None]]:
        """Fail all calls that wait for a thread which ends by an error."""
        with self._lock:
            lost, self._waiting = self._waiting, deque()
            self._has_thread = False
            for _ in lost:
                self._owner.async_end()
        for work in lost:
            work._lose(error)
        return [completion for work in lost for completion in work._finish()]
