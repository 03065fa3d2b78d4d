# SPDX-License-Identifier: Apache-2.0
"""The order of the receives with one tag.

Decides for which receive a message is. Must not know how messages come.
"""

import threading

from fastcoll.calls.transfers import ANY, Transfer


class Turns:
    """The receives with one tag from other nodes: a message is for the first that it fits.

    So a receive from any rank holds up all receives that were started after it. No message is for
    them before that receive has one. (MPI 4.1, section 3.5.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Transfer] = []

    def enter(self, receive: Transfer) -> None:
        """Add a receive, behind those that are open."""
        with self._lock:
            self._open.append(receive)

    def leave(self, receive: Transfer) -> None:
        """Drop one that is over."""
        with self._lock:
            self._open = [one for one in self._open if one is not receive]

    def is_next(self, receive: Transfer, peer: int) -> bool:
        with self._lock:
            return next(one for one in self._open if one.peer in (peer, ANY)) is receive
