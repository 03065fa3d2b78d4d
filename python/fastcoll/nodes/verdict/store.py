# SPDX-License-Identifier: Apache-2.0
"""A store whose waits hold up no other wait, and can be ended.

A store of torch keeps its one connection while it waits, so two waits of a process stop each other.
This one asks again and again.

The ranks of a lane meet here before they connect, and either all of them connect or none. Nothing
ends Gloo's wait for a connection, which lasts five times the limit that Gloo is given. A rank that
left for an error elsewhere would leave its peer there. So one entry, written once, says whether the
lane connects. The last rank to arrive writes yes; a rank that must leave writes no. After that only
the loss of a rank ends a wait, and Gloo is given a fifth of the limit. A rank without descriptors
for the connections writes no: Gloo ends a process that can't accept one.
"""

import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from fastcoll.bootstrap.blocking_calls import ask
from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.os_errors import as_driver_error
from fastcoll.errors import CollectiveTimeout, FastcollError, PeerLostError
from fastcoll.nodes.verdict.backoff import wait_until

_PAUSES_S = 1e-3, 0.05  # each question is one to the store
_SPARE = 8  # descriptors beside those of a lane: its first one takes some, and other threads do
_LAST_S = 0.5  # for the store to answer a question at the end of the limit
_GO, _STOP = b"go", b"stop"
T = TypeVar("T")


class PollingStore(Store):
    """The methods of a store that Gloo and MPI's lanes need, over another store.

    A carrier's connecting can't be ended, so ranks do it together or not at all: see `meet`.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        deadline: Deadline,
        look: Callable[[], None],
        ranks: Iterable[int],
        mine: int,
    ) -> None:
        """Stand for a part of `store` that `ranks` use; an error of `look` ends a wait.

        `mine` is the rank of this process.
        """
        super().__init__()
        self.deadline = deadline
        self._look = look
        self._ranks = frozenset(ranks)
        self._mine = mine
        self._under = PrefixStore(prefix, store)
        self._all_go = False

    def meet(self) -> None:
        """Wait until all ranks are here; after that only the loss of one of them ends a wait.

        One rank decides, once, whether all go on: the last one to come, or the first that gets an
        error and has to leave.
        """
        try:
            self._check_descriptors()
            if self.add("here", 1) == len(self._ranks):
                fate = self._decide(_GO)
            else:
                fate = self.get("fate")
        except RuntimeError:
            if self._decide(_STOP) == _STOP:
                raise
            fate = _GO
        if fate == _STOP:
            self.wait(["the reason, which whoever stopped tells"])
        self._all_go = True

    def _check_descriptors(self) -> None:
        """Raise DriverError unless this process may open a socket to each other rank now."""
        count = len(self._ranks) - 1 + _SPARE
        room = f"less than {count} descriptors left to connect to other nodes"
        with as_driver_error(f"rank {self._mine} has {room}"), ExitStack() as sockets:
            for _ in range(count):
                sockets.enter_context(socket.socket(socket.AF_UNIX))

    def _decide(self, fate: bytes) -> bytes:
        return self._ask(lambda: self._under.compare_set("fate", "", fate.decode()))

    def _ask(self, question: Callable[[], T]) -> T:
        """Return the store's answer; RuntimeError, as of torch's stores, if there is none."""
        limit_s = max(self.deadline.left_s(), _LAST_S)
        try:
            return ask(question, limit_s)
        except TimeoutError:
            raise RuntimeError(f"the store did not answer within {limit_s:.3g} s") from None

    def set(self, key: str, value: Any) -> None:
        self._ask(lambda: self._under.set(key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there."""
        self.wait([key])
        return self._ask(lambda: self._under.get(key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all of them were written."""
        return bool(self._ask(lambda: self._under.check(keys)))

    def add(self, key: str, value: int) -> int:
        return self._ask(lambda: self._under.add(key, value))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of them were written, or the deadline has passed."""
        del timeout  # Gloo's own

        def look() -> None:
            try:
                self._look()
            except FastcollError as error:
                if not self._all_go or self._has_lost_rank(error):
                    raise

        if not wait_until(lambda: self.check(keys), look, self.deadline, pauses_s=_PAUSES_S):
            raise RuntimeError(f"nobody wrote {keys} within {self.deadline.limit_s:g} s")

    def _has_lost_rank(self, error: FastcollError) -> bool:
        lost = error.ranks if isinstance(error, CollectiveTimeout | PeerLostError) else ()
        return not self._ranks.isdisjoint(lost)
