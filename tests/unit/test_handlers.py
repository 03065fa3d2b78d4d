# SPDX-License-Identifier: Apache-2.0
"""Signal handlers that interrupt the queue of calls, at each of its steps."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest

from fastcoll.bootstrap.deadline import Deadline, Flag
from fastcoll.calls import pool
from fastcoll.calls.work import CallQueue, QueuedWork
from fastcoll.errors import FastcollError
from fastcoll.gpu import work as gpu_work
from fastcoll.nodes.transfers.turns import Turns
from tests.support.harness import DEADLINE_S
from tests.support.interrupts import at_each_step, interrupted, within_deadline
from tests.unit.test_queue_thread import Owner

WAIT_S = DEADLINE_S / 2


def stop() -> None:
    raise KeyboardInterrupt


@pytest.fixture(params=["no thread", "idle thread"])
def new_pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Makes a pool for the process, without a thread or with one that waits for a task."""

    def make() -> Any:
        made = pool._Pool()
        monkeypatch.setattr(pool, "_pool", made)
        if request.param == "idle thread":
            done = threading.Event()
            made.submit(done.set)
            assert done.wait(WAIT_S)
        return made

    return make


def test_a_handler_may_queue_a_call_and_wait(new_pool: Callable[[], Any]) -> None:
    def check(number: int) -> bool:
        made, owner, ran = new_pool(), Owner(), list[str]()
        queue, works = CallQueue(owner), list[Any]()

        def handle() -> None:
            assert queue.submit(lambda: ran.append("handler's"), []).wait(WAIT_S)

        def submit() -> None:
            works.append(queue.submit(lambda: ran.append("main"), []))

        has_step = interrupted(submit, handle, number)
        assert works[0].wait(WAIT_S)
        queue.join()
        made.end()
        assert sorted(ran) == ["handler's", "main"][not has_step :]
        assert owner.idle()
        return has_step

    within_deadline(lambda: at_each_step(check))


def test_an_interrupted_submission_leaves_nothing_open(new_pool: Callable[[], Any]) -> None:
    """Ctrl-C ends it; the call has run, or does not run, and the program can leave."""

    def check(number: int) -> bool:
        made, owner, ran = new_pool(), Owner(), list[str]()
        queue = CallQueue(owner)

        def submit() -> None:
            with suppress(FastcollError):  # "no thread": Thread.start may hide the interrupt
                queue.submit(lambda: ran.append("first"), [])

        has_step = interrupted(submit, stop, number)
        queue.join()
        made.end()
        num_ran = len(ran)
        made._is_ended = False
        assert queue.submit(lambda: ran.append("second"), []).wait(WAIT_S)
        made.end()
        assert ran == ["first", "second"][1 - num_ran :]
        assert owner.idle()
        return has_step

    within_deadline(lambda: at_each_step(check))


def test_a_handler_may_wait_for_the_same_call() -> None:
    def check(number: int) -> bool:
        gate = threading.Event()
        work = CallQueue(Owner()).submit(gate.wait, [])

        def handle() -> None:
            gate.set()
            assert work.wait(WAIT_S)

        open_late = threading.Timer(0.05, gate.set)
        open_late.start()
        has_step = interrupted(lambda: work.wait(WAIT_S), handle, number)
        open_late.join()
        return has_step and number < 40  # then the wait only goes round

    within_deadline(lambda: at_each_step(check))


@pytest.mark.parametrize("is_done", [False, True])
def test_a_handler_may_ask_for_the_same_future(is_done: bool) -> None:
    def check(number: int) -> bool:
        gate, futures = threading.Event(), list[Any]()
        work = CallQueue(Owner()).submit(gate.wait, [])
        if is_done:
            gate.set()
            work.wait(WAIT_S)

        def ask() -> None:
            futures.append(work.get_future())

        has_step = interrupted(ask, ask, number)
        gate.set()
        assert work.wait(WAIT_S)
        assert [future.wait() for future in futures] == [[]] * (1 + has_step)
        assert work.get_future().wait() == []
        return has_step

    within_deadline(lambda: at_each_step(check))


def test_a_handler_may_ask_for_the_same_future_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_work, "future_of", lambda *_: object())

    def check(number: int) -> bool:
        work = gpu_work.DeviceWork(mock.Mock(), mock.Mock(), [])
        return interrupted(work.get_future, work.get_future, number)

    within_deadline(lambda: at_each_step(check))


def test_a_call_without_a_thread_is_not_begun_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler's call runs, though there was no thread for the call that it interrupted."""
    ran: list[str] = []
    queue = CallQueue(Owner())
    find_thread = pool._pool.submit

    def refuse(task: Callable[[], object]) -> None:
        monkeypatch.setattr(pool._pool, "submit", find_thread)
        assert queue.submit(lambda: ran.append("handler's"), []).wait(WAIT_S)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool._pool, "submit", refuse)
    within_deadline(lambda: queue.submit(lambda: ran.append("main"), []))
    assert ran == ["main", "handler's"]  # the handler's thread has begun both


def test_a_handler_may_wait_for_the_same_flag() -> None:
    def check(number: int) -> bool:
        flag = Flag()
        flag.set()
        return interrupted(lambda: flag.wait(WAIT_S), lambda: flag.wait(WAIT_S), number)

    within_deadline(lambda: at_each_step(check))


def test_a_handler_may_look_at_the_clock() -> None:
    def check(number: int) -> bool:
        return interrupted(lambda: Deadline(1.0), lambda: Deadline(1.0).left_s(), number)

    within_deadline(lambda: at_each_step(check))


def test_a_handler_may_enter_a_receive() -> None:
    def check(number: int) -> bool:
        turns, first, second = Turns(), Receive(), Receive()

        def enter() -> None:
            turns.enter(first)
            turns.leave(first)

        has_step = interrupted(enter, lambda: turns.enter(second), number)
        assert not has_step or turns.is_next(second, 0)
        return has_step

    within_deadline(lambda: at_each_step(check))


class Receive(Any):  # type: ignore[misc]
    peer = 0


def test_the_same_work_is_ended_once() -> None:
    """A thread that has begun a call keeps it; its queue can't take it back."""
    queue = CallQueue(Owner())
    work = QueuedWork(lambda: None, [])
    assert work._begin() is not None
    assert not queue.take_back(work, KeyboardInterrupt())
    assert not work.is_completed()
