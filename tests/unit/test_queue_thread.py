# SPDX-License-Identifier: Apache-2.0
"""The queue of calls that need Python, and the pool that it takes its threads from."""

import os
import threading
from collections.abc import Callable

import pytest

from fastcoll.calls import pool
from fastcoll.calls.work import CallQueue, QueuedWork
from fastcoll.errors import FastcollError
from tests.support.harness import DEADLINE_S
from tests.support.interrupts import within_deadline


class Owner:
    """A group that counts its queued calls."""

    def __init__(self) -> None:
        self.num_queued = 0
        self.at_native: Callable[[], None] = lambda: None

    def idle(self) -> bool:
        return self.num_queued == 0

    def async_begin(self) -> None:
        self.num_queued += 1

    def async_end(self) -> None:
        self.num_queued -= 1

    def await_native(self) -> None:
        self.at_native()


def leave(number: int) -> None:
    raise SystemExit(number)


# A planted SystemExit ends a thread of the pool.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["in a call", "before a call"])
def test_a_queue_that_loses_its_thread_fails_its_works(where: str) -> None:
    owner, started, gate = Owner(), threading.Event(), threading.Event()
    queue = CallQueue(owner)

    def run() -> None:
        started.set()
        gate.wait()

    first = queue.submit(run, [])
    assert started.wait(DEADLINE_S)
    second = queue.submit(lambda: leave(3) if where == "in a call" else None, [])
    third = queue.submit(lambda: None, [])
    future = third.get_future()
    if where == "before a call":
        owner.at_native = lambda: leave(3)
    gate.set()
    within_deadline(queue.join)
    assert first.wait(DEADLINE_S)
    for work in (second, third):
        with pytest.raises(FastcollError, match=r"thread .* ended: SystemExit\(3\)"):
            work.wait(DEADLINE_S)
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(DEADLINE_S)
    with pytest.raises(FastcollError, match="thread"):
        future.wait()
    owner.at_native = lambda: None
    assert owner.idle()
    assert queue.submit(lambda: None, []).wait(DEADLINE_S)


def test_futures_are_completed_when_the_pool_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter ends: a callback comes once no call is queued any more."""
    owner, gate, seen = Owner(), threading.Event(), []
    queue = CallQueue(owner)
    works = [queue.submit(gate.wait, []), queue.submit(lambda: None, [])]
    # A finished future may still be calling its callbacks: only a callback shows that it ran.
    called = threading.Semaphore(0)

    def note(_: object) -> None:
        seen.append(owner.num_queued)
        called.release()

    for work in works:
        work.get_future().add_done_callback(note)

    def refuse(*args: object) -> None:
        raise RuntimeError("the interpreter ends")

    monkeypatch.setattr(pool._pool, "submit", refuse)
    gate.set()
    within_deadline(queue.join)
    assert all(called.acquire(timeout=DEADLINE_S) for _ in works)
    assert seen == [0, 0]
    with pytest.raises(FastcollError, match="no thread for an asynchronous call"):
        queue.submit(lambda: None, [])
    monkeypatch.undo()
    assert queue.submit(lambda: None, []).wait(DEADLINE_S)


def test_a_task_that_was_refused_does_not_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(pool, "_pool", pool._Pool())

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(FastcollError, match="can't start new thread"):
            pool.run_in_pool(ran.append, "refused")
    done = threading.Event()
    pool.run_in_pool(ran.append, "taken")
    pool.run_in_pool(done.set)
    assert done.wait(DEADLINE_S)
    pool._pool.end()
    assert ran == ["taken"]


def test_a_forked_child_waits_for_nothing() -> None:
    gate = threading.Event()
    queue = CallQueue(Owner())
    work = queue.submit(gate.wait, [])
    child = os.fork()
    if child == 0:
        try:
            queue.join()
            work.wait()
        except FastcollError:
            os._exit(0)
        os._exit(1)
    try:
        waited: list[tuple[int, int]] = []
        within_deadline(lambda: waited.append(os.waitpid(child, 0)))
        assert waited == [(child, 0)]
    finally:
        gate.set()
    assert isinstance(work, QueuedWork)
    assert work.wait(DEADLINE_S)
