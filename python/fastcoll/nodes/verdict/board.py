# SPDX-License-Identifier: Apache-2.0
"""A group's entries in the store: its verdict, and the progress of each node.

Decides the keys, and that the first verdict wins. Every wait for the store has a limit: a store
behind a cut link does not answer. All boards of a process share one connection to their store.
Whenever torch connects, it asks a name server, and waits for one that does not answer. Must not
know a verdict's reason.
"""

import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import DistNetworkError, PrefixStore, Store

from fastcoll.bootstrap.blocking_calls import ask, in_background
from fastcoll.bootstrap.exchange import without_prefixes
from fastcoll.errors import (
    AbortedError,
    CollectiveTimeout,
    DesyncError,
    DriverError,
    FastcollError,
    PeerLostError,
)

T = TypeVar("T")
_KINDS = {kind.__name__: kind for kind in (AbortedError, CollectiveTimeout, PeerLostError)}
# The time for an answer of a store that has been silent: it gets the question, if it lives.
_SILENT_S = 0.1
# The own connection of the boards of each store; gone with its last board.
_connections: "weakref.WeakKeyDictionary[Store, Store]" = weakref.WeakKeyDictionary()
_lock: threading.RLock


def _forget_lock() -> None:
    """Take a new lock: a forked child may have its parent's, held by a thread it has not."""
    global _lock
    _lock = threading.RLock()  # a signal handler may come here, too


_forget_lock()
os.register_at_fork(after_in_child=_forget_lock)


def _own_connection(store: Store, limit_s: float) -> Store:
    """Return a connection to this store of its own: a user's wait would hold up a verdict."""
    with _lock:
        known = _connections.get(store)
    if known is None:  # without the lock: to connect may take long
        try:
            made: Store = ask(store.clone, limit_s)  # type: ignore[attr-defined]
        except (RuntimeError, TimeoutError) as error:
            raise CollectiveTimeout(
                f"init: the store could not be connected to once more: {error}"
            ) from error
        with _lock:
            known = _connections.setdefault(store, made)
    return known


def _run_beside(task: Callable[[], object]) -> None:
    """Ask the store in the background; here where there is no thread for it, as `ask` does."""
    try:
        in_background(task)
    except FastcollError:
        task()


class Board:
    """The store as the group uses it after its making.

    `nonce` is a text that no other group has: so the prefixes of `store` are not needed. Limits are
    in seconds; None is `ANSWER_S`, or less while the store is silent.
    """

    ANSWER_S = 1.0

    def __init__(self, store: Store, nonce: str, limit_s: float | None = None) -> None:
        """Connect to the store.

        Raises:
            CollectiveTimeout: It does not answer.
        """
        # Kept: the connection is shared as long as torch's object for this store is the same one.
        self._shared = without_prefixes(store)
        self.host: str = getattr(self._shared, "host", "")  # "": it has none, as a file
        connection = _own_connection(self._shared, self.ANSWER_S if limit_s is None else limit_s)
        self._store = PrefixStore(f"fastcoll/board/{nonce}", connection)
        self._asking = threading.Event()
        self._asked_at = 0.0
        self._is_lost = False  # torch never connects again, and prints a stack at each attempt
        self._verdict: FastcollError | None = None
        self.verdict_sequence = 0  # the call in which the verdict was found

    def decide_verdict(self, error: FastcollError, sequence: int = 0) -> FastcollError:
        """Make a call's error the group's verdict unless it has one; return the one that holds."""
        found = self.write_first("verdict", f"{sequence} {text_of_error(error)}")
        return error_from_text(found or "") or error

    def say(self, key: str, text: str, limit_s: float | None = None) -> None:
        """Write something, if the store answers in time."""
        self._ask(lambda: self._store.set(key, text), limit_s)

    def write_first(self, key: str, text: str, limit_s: float | None = None) -> str | None:
        """Write a text unless there is one; return the text that holds, None without an answer."""
        return self._ask(lambda: self._store.compare_set(key, "", text).decode(), limit_s)

    def read(self, key: str, limit_s: float | None = None) -> str | None:
        """Return the text under a key, "" if there is none; None without an answer."""

        def look() -> str:
            return self._store.get(key).decode() if self._store.check([key]) else ""

        return self._ask(look, limit_s)

    def append(self, key: str, text: str, limit_s: float) -> None:
        """Add a text behind those of the others, if the store answers in time."""

        def write() -> None:
            number = self._store.add(key, 1)
            self._store.set(f"{key}/{number}", text)

        self._ask(write, limit_s)

    def appended(self, key: str, known: int) -> list[str]:
        """Return the texts after the first `known` ones, as far as the store answers."""

        def look() -> list[str]:
            texts: list[str] = []
            for number in range(known + 1, self._store.add(key, 0) + 1):
                if not self._store.check([f"{key}/{number}"]):
                    break  # it is being written
                texts.append(self._store.get(f"{key}/{number}").decode())
            return texts

        return self._ask(look) or []

    @property
    def is_silent(self) -> bool:
        """Whether the store is lost, or has not told for a while whether there is a verdict."""
        hangs = self._asking.is_set() and time.monotonic() > self._asked_at + self.ANSWER_S
        return self._is_lost or hangs

    def verdict(self) -> FastcollError | None:
        """Return the verdict as far as it is known. Reads the store in the background."""
        if self._verdict is None and not self._asking.is_set():
            self._asked_at = time.monotonic()
            self._asking.set()
            _run_beside(self._look)
        return self._verdict

    def take_verdict(self, text: str) -> None:
        """Take a verdict as it stands in the store, "" if there is none, from elsewhere."""
        number, _, error = text.partition(" ")
        if number.isdecimal() and (verdict := error_from_text(error)):
            self.verdict_sequence = int(number)
            self._verdict = verdict

    def arrive(self, node: int, sequence: int) -> None:
        """Write, in the background, that a node waits for the others in a call."""
        _run_beside(
            lambda: self._ignore_errors(lambda: self._store.set(f"at/{node}", str(sequence)))
        )

    def tell_gone(self, rank: int) -> None:
        """Write, in the background, that a rank's process ended or left the group."""
        _run_beside(lambda: self._ignore_errors(lambda: self._store.set(f"gone/{rank}", "gone")))

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank of its node told so, as far as the store answers."""
        return bool(self.read(f"gone/{rank}"))

    def missing(self, keys: list[str], number: int) -> list[int] | None:
        """Return the places of keys that have no such number yet; None without an answer."""

        def look() -> list[int]:
            found = self._values(keys)
            return [place for place, key in enumerate(keys) if int(found.get(key, 0)) < number]

        return self._ask(look)

    def _values(self, keys: list[str]) -> dict[str, bytes]:
        """Return the values of some keys: few questions, if most were written, or none."""
        written = self._written(keys)
        if not self._store.has_extended_api():  # type: ignore[attr-defined]
            return {key: self._store.get(key) for key in written}
        return dict(zip(written, self._store.multi_get(written), strict=True)) if written else {}

    def _written(self, keys: list[str]) -> list[str]:
        if self._store.check(keys):
            return keys
        half = len(keys) // 2
        return self._written(keys[:half]) + self._written(keys[half:]) if half else []

    def _look(self) -> None:
        def get() -> None:
            if self._store.check(["verdict"]):
                self.take_verdict(self._store.get("verdict").decode())

        try:
            self._ignore_errors(get)
        finally:  # also where there is no memory, or a signal: the next question may be answered
            self._asking.clear()

    def _ask(self, question: Callable[[], T], limit_s: float | None = None) -> T | None:
        if self._is_lost:
            return None
        if limit_s is None:
            limit_s = _SILENT_S if self.is_silent else self.ANSWER_S
        try:
            return ask(question, limit_s)
        except (RuntimeError, TimeoutError) as error:  # the store is gone, and its answer with it
            self._is_lost |= isinstance(error, DistNetworkError)
            return None

    def _ignore_errors(self, task: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            task()
        except RuntimeError as error:  # the store is gone, and its answer with it
            self._is_lost |= isinstance(error, DistNetworkError)


def text_of_error(error: FastcollError, most: int | None = None) -> str:
    """Return a text that `error_from_text` reads; of the error's own at most so many characters."""
    ranks = list(getattr(error, "ranks", ()))
    return json.dumps({"kind": type(error).__name__, "text": str(error)[:most], "ranks": ranks})


def error_from_text(text: str) -> FastcollError | None:
    """Return the error that was written into a text, if it holds one whole."""
    start = text.find('{"kind":')
    try:
        fields, _ = json.JSONDecoder().raw_decode(text, max(start, 0))
    except ValueError:
        return None
    if fields["kind"] == DriverError.__name__:
        return DriverError(fields["text"])
    kind = _KINDS.get(fields["kind"])
    return DesyncError(fields["text"]) if kind is None else kind(fields["text"], fields["ranks"])
