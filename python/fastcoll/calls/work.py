# SPDX-License-Identifier: Apache-2.0
"""Asynchronous calls: the handle a user gets, and the queue behind it.

Decides in which thread a call runs that needs Python: first in, first out within a group. A group
with queued calls has at most one thread, from the process's pool. Calls that need no Python are
queued in C++ (csrc/group/call_queue.h). Must not know the verbs.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from math import inf, isnan, prod
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fastcoll.bootstrap.deadline import Deadline, Flag
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
        # Without a lock, as a signal handler may come here, too. Threads that ask at once may get
        # futures of their own.
        if not hasattr(self, "_future"):
            future: torch.futures.Future[Any] = torch.futures.Future()
            if self._is_over_soon():
                complete(future, self.result)
            else:
                run_in_pool(complete, future, self.result)
            self._future = future  # type: ignore[misc]  # a slot of the subclass's
        return self._future


class CallWork(_C.CallWork, NativeHandle, Work):
    """A call that C++ carries out without Python."""

    __slots__ = ("__weakref__", "_future")


_C.set_call_work(CallWork)


class QueuedWork(Work):
    """A call that a thread of Python's carries out.

    It has no lock: a signal handler may come between any two steps, and wait for the call.
    """

    def __init__(self, run: Callable[[], None], outputs: list[Array], what: str = "call") -> None:
        self._runs = [run]  # until a thread begins it
        self._what = what
        self._outputs = outputs
        self._error: Exception | None = None
        self._done = Flag()
        self._future: torch.futures.Future[Any] | None = None
        self._open_futures: list[torch.futures.Future[Any]] = []
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
        if self._future is None:
            future = self._new_future()
            self._open_futures.append(future)
            if self._done.is_set() or self._is_inherited():
                for complete_future in self._completions():
                    complete_future()
            self._future = future
        return self._future

    def _new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def _is_inherited(self) -> bool:
        """Return whether only the process from which this one was forked can end the call."""
        return self._pid != os.getpid() and not self._done.is_set()

    def _refuse_in_child(self) -> None:
        if self._is_inherited():
            raise FastcollError(
                f"the call was queued by process {self._pid}, and only there is a thread for it: "
                f"process {os.getpid()} is a fork"
            )

    def _begin(self) -> Callable[[], None] | None:
        """Return the call to the one thread that runs it or ends it; None to all others."""
        try:
            return self._runs.pop()
        except IndexError:
            return None

    def _execute(self) -> bool:
        """Run the call; the outcome waits for `_finish`. False: another thread has ended it."""
        if (run := self._begin()) is None:
            return False
        try:
            run()
        except Exception as error:
            self._error = error
        return True

    def _end_with(self, error: BaseException) -> list[Callable[[], None]]:
        """End a call that has no thread, or whose thread ends by an error; as `_finish`."""
        self._error = FastcollError(f"the thread of the group's queued calls ended: {error!r}")
        self._error.__cause__ = error
        return self._finish()

    def _finish(self) -> list[Callable[[], None]]:
        """End the call; return the completions of its futures if no other thread does them."""
        self._done.set()
        late = []
        for complete_future in self._completions():
            try:
                # Not in this thread: a callback may start further calls of the group and wait.
                run_in_pool(complete_future)
            except FastcollError:
                late.append(complete_future)
        return late

    def _completions(self) -> Iterator[Callable[[], None]]:
        while self._open_futures:
            with suppress(IndexError):  # another thread takes them, too
                yield partial(complete, self._open_futures.pop(), self.result)


def completed(outputs: list[Array], what: str = "call") -> Work:
    """Return the handle of a call that is over."""
    work = QueuedWork(lambda: None, outputs, what)
    work._execute()
    work._finish()
    return work


class _Owner(Protocol):
    """The group whose calls are queued; it is notified of each, and of its end, from any thread."""

    def async_begin(self) -> None: ...

    def async_end(self) -> None: ...

    def await_native(self) -> None: ...

    def idle(self) -> bool: ...


class CallQueue:
    """The calls of one group that need Python, while they wait for their turn.

    No thread waits for a lock of it: a signal handler may come between any two steps, queue a call
    and wait for it. The thread that runs the calls holds `_turn`, and looks for calls once more
    behind it.
    """

    def __init__(self, owner: _Owner) -> None:
        self._owner = owner
        self._waiting: deque[QueuedWork] = deque()
        self._turn = threading.Lock()
        self._coming: list[bool] = []  # empty once the thread that was asked for is there
        self._runner = 0  # the thread that runs the calls
        self._pid = os.getpid()

    def idle(self) -> bool:
        """Return whether a call may run at once, ahead of nothing; a queued call's own may."""
        return self._runner == threading.get_ident() or self._owner.idle()

    def has_calls(self) -> bool:
        """Return whether calls are queued or under way."""
        return bool(self._waiting)

    def submit(self, run: Callable[[], None], outputs: list[Array], what: str = "call") -> Work:
        """Queue a call; `what` is its name."""
        work = QueuedWork(run, outputs, what)
        self.put(work)
        return work

    def put(self, work: QueuedWork) -> None:
        """Queue the call of a handle.

        Raises:
            FastcollError: There is no thread for it; it will not run.
        """
        try:
            self._owner.async_begin()
            self._waiting.append(work)
            if not (self._coming or self._turn.locked()):
                coming = [True]
                run_in_pool(self._drain, coming)
                self._coming = coming
        except BaseException as error:
            # Unless a thread that another caller found has begun it.
            if self.take_back(work, error) or not isinstance(error, FastcollError):
                raise

    def take_back(self, work: QueuedWork, error: BaseException) -> bool:
        """End a call that no thread has begun; False if one has."""
        if work._begin() is None:
            return False
        self._remove(work)
        for complete_future in work._end_with(error):
            complete_future()
        return True

    def join(self) -> None:
        """Wait until all queued calls are over, well or not.

        Each call has a limit, and `_drain` fails the calls that it leaves behind. A forked child
        has no thread for its parent's queued calls, so it waits for nothing.
        """
        if self._pid == os.getpid() and (last := self._at(-1)) is not None:
            Deadline(inf).wait(last._done.wait)

    def _at(self, index: int) -> QueuedWork | None:
        try:
            return self._waiting[index]
        except IndexError:
            return None

    def _remove(self, work: QueuedWork) -> None:
        with suppress(ValueError):  # another thread has removed it
            self._waiting.remove(work)
            self._owner.async_end()

    def _drain(self, coming: list[bool]) -> None:
        coming.clear()
        late: list[Callable[[], None]] = []  # futures for which there is no other thread
        try:
            while self._waiting and self._turn.acquire(blocking=False):
                try:
                    self._runner = threading.get_ident()
                    while (work := self._at(0)) is not None:
                        self._carry_out(work, late)
                finally:
                    self._runner = 0
                    self._turn.release()
        except BaseException as error:  # no thread is left for those that wait
            lost = []
            while (work := self._at(0)) is not None and work._begin() is not None:
                self._remove(work)
                lost.append(work)
            late += [complete_future for work in lost for complete_future in work._end_with(error)]
            raise
        finally:
            # The pool takes no task once the interpreter ends. The queue has no thread any more.
            for complete_future in late:
                complete_future()

    def _carry_out(self, work: QueuedWork, late: list[Callable[[], None]]) -> None:
        self._owner.await_native()
        try:
            is_done = work._execute()
        except BaseException as error:
            self._remove(work)
            late += work._end_with(error)
            raise
        # Before its end: a thread that waited for it finds the group idle, and makes its next call
        # without the queue.
        self._remove(work)
        if is_done:
            late += work._finish()
