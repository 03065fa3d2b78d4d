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

    Each step is one of Python's dict: a signal handler may come between any two.
    """

    def __init__(self) -> None:
        self._open: dict[int, Transfer] = {}  # in order, by their identities
        # Held from a receive's turn to its place in a queue, which has several threads' receives in
        # the same order then. A signal handler may come here, too.
        self.starting = threading.RLock()

    def enter(self, receive: Transfer) -> None:
        """Add a receive, behind those that are open."""
        self._open[id(receive)] = receive

    def leave(self, receive: Transfer) -> None:
        """Drop one that is over."""
        self._open.pop(id(receive), None)

    def is_next(self, receive: Transfer, peer: int) -> bool:
        return next(one for one in list(self._open.values()) if one.peer in (peer, ANY)) is receive
