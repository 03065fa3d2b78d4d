# SPDX-License-Identifier: Apache-2.0
"""A store behind a cut link: it does not answer, and nobody waits for it longer than he says."""

import os
import signal
import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore, Store, TCPStore

from fastcoll.bootstrap import blocking_calls
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.exchange import StoreExchange
from fastcoll.errors import CollectiveTimeout
from fastcoll.nodes.carriers import make_lane
from fastcoll.nodes.verdict.board import Board
from fastcoll.nodes.verdict.store import PollingStore
from tests.support.harness import LATE_S
from tests.support.programs import run_python

LIMIT_S = 0.5


class Silent(Store):
    """Answers as long as it has not heard `after` questions; then never."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self._under = HashStore()
        self._left = after

    def _hear(self) -> None:
        self._left -= 1
        if self._left < 0:
            threading.Event().wait()

    def add(self, key: str, value: int) -> int:
        self._hear()
        return self._under.add(key, value)

    def set(self, key: str, value: Any) -> None:
        self._hear()
        self._under.set(key, value)

    def get(self, key: str) -> bytes:
        self._hear()
        return self._under.get(key)

    def check(self, keys: list[str]) -> bool:
        self._hear()
        return self._under.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._hear()
        return self._under.compare_set(key, expected, desired)


@pytest.mark.parametrize("after", [0, 2, 5])
def test_an_introduction_ends_at_its_limit(after: int) -> None:
    """Whether it is silent from the first question, or falls silent meanwhile."""
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout, match="did not answer"):
        StoreExchange(Silent(after), 0, 2).gather({}, Deadline(LIMIT_S))
    assert time.monotonic() - start < LATE_S


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_lane_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    monkeypatch.setattr("fastcoll.nodes.verdict.store.PrefixStore", lambda _, store: store)

    def never_asked(*_: Any) -> Any:
        raise AssertionError("a carrier was made without the others")

    store = PollingStore(Silent(after), "lane", Deadline(LIMIT_S), lambda: None, (0, 1), 0)
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout, match="did not answer"):
        make_lane(never_asked, store, 0, 2)
    assert time.monotonic() - start < LATE_S


PROGRAM = """
import threading
from torch.distributed import HashStore
from fastcoll.nodes.verdict import board

class Silent(HashStore):
    def check(self, keys):
        threading.Event().wait()

board._own_connection = lambda *_: Silent()
board.PrefixStore = lambda _, store: store
board.without_prefixes = lambda store: store
asked = board.Board(HashStore(), "nonce")
asked.verdict()
print(asked.read("key", 0.1), asked.missing(["at/0", "at/1"], 1))
"""


@pytest.mark.slow
def test_a_process_ends_though_its_questions_do_not() -> None:
    done = run_python("-c", PROGRAM, limit_s=20)
    assert (done.returncode, done.stdout) == (0, "None None\n"), done.stderr


class Counting(HashStore):
    """How many questions it was asked."""

    asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return super().check(keys)

    def get(self, key: str) -> bytes:
        self.asked += 1
        return super().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked += 1
        return super().multi_get(keys)


@pytest.mark.parametrize(("absent", "most"), [((), 2), ((40,), 14), ((3, 40), 26)])
def test_the_board_asks_for_all_nodes_together(
    monkeypatch: pytest.MonkeyPatch, absent: tuple[int, ...], most: int
) -> None:
    store = Counting()
    monkeypatch.setattr("fastcoll.nodes.verdict.board._own_connection", lambda *_: store)
    board = Board(HashStore(), "nonce")
    monkeypatch.setattr(board, "_store", store)
    for node in range(64):
        if node not in absent:
            board.say(f"at/{node}", "6" if node == 10 else "7", LATE_S)
    assert board.missing([f"at/{node}" for node in range(64)], 7) == sorted([10, *absent])
    assert store.asked <= most


def test_a_silent_store_is_not_waited_for_and_gets_its_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process may be stopped. It may also be slow, and then another node needs the verdict."""
    goes_on = threading.Event()

    class Stopped(HashStore):
        def check(self, keys: list[str]) -> bool:
            goes_on.wait()
            return super().check(keys)

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            goes_on.wait()
            return super().compare_set(key, expected, desired)

    made = Stopped()
    monkeypatch.setattr("fastcoll.nodes.verdict.board._own_connection", lambda *_: made)
    board = Board(HashStore(), "nonce")
    monkeypatch.setattr(board, "_store", made)
    monkeypatch.setattr(board, "ANSWER_S", 0.2)
    assert board.verdict() is None
    assert not board.is_silent
    while not board.is_silent:
        time.sleep(0.01)
    monkeypatch.setattr(board, "ANSWER_S", 1e9)  # to wait this long would end the test
    monkeypatch.setattr(board, "_asked_at", -1e9)
    error = CollectiveTimeout("late", [1])
    assert board.decide_verdict(error) is error
    goes_on.set()
    while board.is_silent or board.verdict() is None:
        time.sleep(0.01)
    assert str(board.verdict()) == "late"


def test_a_forked_child_may_ask() -> None:
    """Another thread holds the lock of the questions when the process forks."""
    with blocking_calls._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(int(LATE_S))  # ends it, if it waits for a thread that it has not got
            try:
                os._exit(0 if blocking_calls.ask(lambda: 1, LATE_S) == 1 else 1)
            finally:
                os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_a_store_that_is_gone_is_asked_once(capfd: pytest.CaptureFixture[str]) -> None:
    """torch prints a stack for each question to a store whose process ended."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(TCPStore("127.0.0.1", server.port, is_master=False), "nonce")
    board.say("key", "text")
    assert board.read("key") == "text"
    del server
    capfd.readouterr()
    for _ in range(5):
        assert board.read("key") is None
        assert board.verdict() is None
        assert board.missing(["at/0", "at/1"], 1) is None
        time.sleep(0.02)
    assert capfd.readouterr().err.count("TCPStore.cpp") <= 2
