# SPDX-License-Identifier: Apache-2.0
"""Threads that want the same group: one makes it, the others wait for that one alone."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fastcoll.bootstrap.makers import Makers
from fastcoll.errors import CollectiveTimeout, FastcollError, PeerLostError, UsageError
from tests.support.harness import DEADLINE_S

LIMIT_S = 20.0


class Making:
    """A thread that makes a group until it is told to end, and what it raised."""

    def __init__(self, makers: Makers, key: str, error: BaseException | None = None) -> None:
        self._makers, self._key, self._error = makers, key, error
        self._entered, self._may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._entered.wait(DEADLINE_S)

    def _run(self) -> None:
        try:
            with self._makers.hold(self._key, self._key, LIMIT_S):
                self._entered.set()
                self._may_end.wait(DEADLINE_S)
                if self._error is not None:
                    raise self._error
        except BaseException as error:
            assert error is self._error

    def end(self) -> None:
        self._may_end.set()
        self._thread.join(DEADLINE_S)


def waiting(makers: Makers, key: str) -> tuple[threading.Thread, list[Any]]:
    """Return a thread that wants a group, and what becomes of it."""
    found: list[Any] = []

    def run() -> None:
        try:
            with makers.hold(key, key, LIMIT_S):
                found.append("made")
        except FastcollError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_another_group_is_made_meanwhile() -> None:
    makers = Makers()
    first = Making(makers, "a")
    thread, found = waiting(makers, "b")
    thread.join(DEADLINE_S)
    assert found == ["made"]
    assert makers.is_busy("a")
    assert not makers.is_busy("b")
    first.end()
    assert not makers.is_busy("a")


def test_the_same_group_is_waited_for() -> None:
    makers = Makers()
    first = Making(makers, "a")
    thread, found = waiting(makers, "a")
    thread.join(0.2)
    assert found == []
    first.end()
    thread.join(DEADLINE_S)
    assert found == ["made"]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (PeerLostError("rank 3 died", [3]), lambda found: found.ranks == (3,)),
        (UsageError("its arguments"), lambda found: found == "made"),
        (KeyboardInterrupt(), lambda found: "interrupted" in str(found)),
    ],
)
def test_who_waits_hears_of_an_error(error: BaseException, wanted: Callable[[Any], bool]) -> None:
    makers = Makers()
    first = Making(makers, "a", error)
    thread, found = waiting(makers, "a")
    thread.join(0.2)
    first.end()
    thread.join(DEADLINE_S)
    assert wanted(found[0]), found
    with makers.hold("a", "a", LIMIT_S):  # a later call tries again
        pass


def test_a_wait_has_a_limit() -> None:
    makers = Makers()
    first = Making(makers, "a")
    late = pytest.raises(CollectiveTimeout, match=r"another thread, which is making \"a\"")
    with late, makers.hold("a", "a", 0.1):
        pass
    first.end()


def test_a_handler_that_interrupts_the_maker_is_refused() -> None:
    makers = Makers()
    refused = pytest.raises(UsageError, match="signal handler")
    with makers.hold("a", "a", LIMIT_S), refused, makers.hold("a", "a", LIMIT_S):
        pass
    assert not makers.is_busy("a")
