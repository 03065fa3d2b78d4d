# SPDX-License-Identifier: Apache-2.0
"""Waits for other nodes: none without a limit, and one verdict for all ranks of the group.

Decides how a wait ends (the transfer, the limit, a verdict from anywhere) and which rank an error
names. A rank that fails writes the verdict on the board, and waiting ranks of other nodes read it.
The rank also breaks its node's group with it: ranks that wait there wake up without a store. Where
all of a node wait for one another, the protocol's waits call `listen`. Must not know the data.

Gloo does not report everything. When a connection breaks, Gloo tells every operation that waits for
it, except the one whose bytes were in flight. The code is `Pair::signalException` in
gloo/transport/tcp/pair.cc: A received operation is no longer on its list, and of sent ones it looks
at bound buffers only. So a rank that waits also asks the operations that it has started behind.
Without any, the death of a whole node in the middle of a message shows at the limit only, as
`CollectiveTimeout`. While a rank of that node lives, it tells the others.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.forks import refusal
from fastcoll.bootstrap.node_map import Seat
from fastcoll.calls.group import BaseGroup
from fastcoll.errors import (
    AbortedError,
    CollectiveTimeout,
    DesyncError,
    FastcollError,
    PeerLostError,
    UsageError,
)
from fastcoll.native import _C
from fastcoll.nodes.carriers.carrier import Started
from fastcoll.nodes.verdict.attendance import Attendance
from fastcoll.nodes.verdict.backoff import LOOK_EVERY_S, wait_until
from fastcoll.nodes.verdict.board import Board, error_from_text, text_of_error
from fastcoll.nodes.verdict.doors import Door
from fastcoll.nodes.verdict.fallback import Fallback
from fastcoll.nodes.verdict.machines import Machines

# A wait this long says so on the board, and looks there for a verdict. That is rare enough for a
# store that serves a thousand nodes, and lets a rank see an error well within a second.
_LONG_S = 0.05
# How often a rank that waits looks whether ranks of its node are gone.
_ROLL_CALL_S = 0.5
# How long a rank that lost a connection or timed out waits for a better-informed rank's error.
GRACE_S = 1.0
# How long the process that serves the store, or a witness, keeps a verdict: it may end with the
# error. A waiting rank looks every 0.1 s, and reads the answer at its next look.
_KEPT_S = 0.5
# The time from a rank's timeout until its node knows, if the store does not answer. The rank
# listens, asks for the missing nodes, listens again, and decides the verdict.
SPEAKING_S = 2 * (GRACE_S + Board.ANSWER_S)
# In all errors of limits, as in those of one node. Programs know them by the word "timeout".
_IF_SLOW = ". If the ranks are only slow, raise the timeout (timeout_s=, FASTCOLL_TIMEOUT_S)"
# The same as in csrc/cpu/group_status.h.
_OVER = ". Use of this group is over: call fastcoll.shrink() or fastcoll.destroy()"
# Characters of an error that fit into a node's verdict, even if all of them are escaped.
_NODE_TEXT = 800


class Watch:
    """One rank's waits in a group over several nodes."""

    def __init__(
        self, name: str, seat: Seat, node_group: BaseGroup, board: Board, door: Door
    ) -> None:
        self.error: FastcollError | None = None
        self.sequence = 0
        self.call = "init"
        self.name = name
        self._rank = seat.rank
        self._node_map = seat.node_map
        self._node, self._local_rank = seat.node_map.places[seat.rank]
        self._node_group = node_group
        self._board = board
        self._machines = Machines(seat, board, door)
        self._fallback = Fallback(seat, board, door)
        self._serves_store = seat.rank == seat.store_rank
        self.attendance = Attendance(board, seat.rank, len(seat.node_map.places))
        self._process = os.getpid()
        self._next_look = 0.0
        self._next_roll_call = 0.0
        self._told_gone: set[int] = set()  # ranks of this node
        self._callers: set[int] = set()  # threads that are in a call
        self._moment: Deadline | None = None  # that a later call's verdict leaves this call

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the rank."""
        return os.getpid() != self._process

    def refuse_child(self) -> None:
        """Raise UsageError in a forked child, which may not speak for the rank."""
        if self.is_inherited:
            raise refusal(self.name)

    def refuse_handler(self) -> None:
        """Raise UsageError in a signal handler that has interrupted a call of the group."""
        if threading.get_ident() in self._callers:  # the same text as in csrc/group
            raise UsageError(
                f'group "{self.name}" is in a call of this thread, which a signal handler has '
                "interrupted: the handler can't use the group; it may call abort(), or set a flag "
                "for the program to look at"
            )

    @property
    def is_in_call(self) -> bool:
        """Whether a thread is in a call of the group."""
        return bool(self._callers)

    def begin(self, sequence: int, call: str) -> None:
        """Say which call the waits to come belong to."""
        self.sequence, self.call, self._moment = sequence, call, None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Be in a call: long waits for ranks of this node hear that the group broke elsewhere."""
        self._next_look = time.monotonic() + _LONG_S
        caller = threading.get_ident()
        _listening.append(self)
        try:
            self._callers.add(caller)
            yield
        finally:
            self._callers.discard(caller)
            _listening.remove(self)

    def listen(self) -> None:
        """Break this node's part of the group if the group has a verdict; called now and then."""
        now = time.monotonic()
        if now < self._next_look or self.is_inherited:
            return
        self._next_look = now + LOOK_EVERY_S
        if verdict := self.verdict_to_raise():
            self.fail(verdict)

    def wait(
        self, transfers: Sequence[Started], deadline: Deadline, behind: Iterable[Started] = ()
    ) -> None:
        """Wait for transfers to be over; `behind` are others under way.

        Raises:
            FastcollError: The group's verdict, or the error that shall become it.
        """
        for index, transfer in enumerate(transfers):
            self._wait(transfer, deadline, (*transfers[index + 1 :], *behind))
            self._end(transfer)

    def _end(self, transfer: Started) -> None:
        try:
            transfer.wait()
        except RuntimeError as error:
            raise self.broken(str(error)) from error

    def _wait(self, transfer: Started, deadline: Deadline, behind: Sequence[Started]) -> None:
        has_arrived = False

        def check() -> None:
            nonlocal has_arrived
            if not has_arrived:
                self.arrive()
            has_arrived = True
            self._check_node_group()
            if verdict := self.verdict_to_raise():
                raise verdict
            # Gloo does not tell the transfer whose bytes were in flight when a connection broke.
            for other in behind:
                if other.is_completed():
                    self._end(other)

        if not wait_until(transfer.is_completed, check, deadline, first_check_s=_LONG_S):
            raise self.late(deadline)

    def arrive(self) -> None:
        """Write on the board that this node waits in the call; only its leader writes."""
        if self._local_rank == 0:
            self._board.arrive(self._node, self.sequence)

    def _check_node_group(self) -> None:
        try:
            self._node_group.check()
        except FastcollError as error:
            raise self.of_node(error) from error

    def _describe(self, what: str = "") -> str:
        what = what or f"{self.call} #{self.sequence}"
        return f'{what} in group "{self.name}" (seen by rank {self._rank} on node {self._node})'

    def _ranks_of(self, nodes: Iterable[int]) -> list[int]:
        return [rank for node in nodes for rank in self._node_map.nodes[node]]

    def verdict_to_raise(self) -> FastcollError | None:
        """Return the verdict that ends a wait; one of a later call leaves it a moment to end.

        Each rank that is in a later call has given this one its data, and its messages before it.
        They may be on the way. Every wait asks for the verdict. So this rank also tells here which
        ranks of its node are gone: who waits for them elsewhere may have no connection to them.
        """
        if self.error:
            return self.error
        ignore_errors(self._tell_gone)  # a group that is closed has no peers
        verdict = self._find_verdict() or self._lost_machines()
        if verdict is None or self._board.verdict_sequence <= self.sequence:
            return verdict
        self._moment = self._moment or Deadline(GRACE_S)
        return verdict if self._moment.passed() else None

    def _find_verdict(self) -> FastcollError | None:
        if self._board.is_silent:
            self._fallback.ask()
        return self._board.verdict()

    def _lost_machines(self) -> FastcollError | None:
        nodes = self._machines.lost_nodes()
        if not nodes:
            return None
        return PeerLostError(
            f"{self._describe()} lost {self._node_map.describe(nodes)}: no answer from that "
            "machine any more (is it up, and the network there and here?)",
            self._ranks_of(nodes),
        )

    def _tell_gone(self) -> None:
        if (now := time.monotonic()) < self._next_roll_call:
            return
        self._next_roll_call = now + _ROLL_CALL_S
        for local, rank in enumerate(self._node_map.nodes[self._node]):
            if rank not in self._told_gone and self._node_group.peer_is_gone(local):
                self._told_gone.add(rank)
                self._board.tell_gone(rank)

    def close(self) -> None:
        """Look at no other machine any more."""
        self._machines.close()
        self._fallback.close()

    def await_verdict(self) -> FastcollError | None:
        """Wait a moment for the verdict of a better-informed rank."""
        grace = Deadline(GRACE_S)
        while not grace.passed():
            if verdict := self._find_verdict():
                return verdict
            time.sleep(0.02)
        return None

    def _suspects(self) -> list[int]:
        """Return the nodes that do not wait in this call, as far as is known."""
        others = [node for node in range(self._node_map.num_nodes) if node != self._node]
        arrivals = [f"at/{node}" for node in range(self._node_map.num_nodes)]
        missing = self._board.missing(arrivals, self.sequence)
        found = [node for node in missing or () if node != self._node]
        return found or others

    def late(self, deadline: Deadline) -> FastcollError:
        """Return the error of a wait that reached its limit."""
        if verdict := self.await_verdict():
            return verdict
        nodes = self._suspects()
        # One of several may wait in an earlier call. Its limit ran out before this one's, and it
        # knows better who is missing.
        if len(nodes) > 1 and (verdict := self.await_verdict()):
            return verdict
        return CollectiveTimeout(
            f"{self._describe()} waited {deadline.limit_s:g} s for "
            f"{self._node_map.describe(nodes)}: no answer from there (is the network up?)",
            self._ranks_of(nodes),
        )

    def broken(self, reason: str) -> FastcollError:
        """Return the error of a transfer that failed."""
        self.arrive()
        if verdict := self.await_verdict():
            return verdict
        nodes = self._suspects()
        return PeerLostError(
            f"{self._describe()} lost its connection to {self._node_map.describe(nodes)}: {reason}",
            self._ranks_of(nodes),
        )

    def fail(self, error: FastcollError) -> FastcollError:
        """Break the group, everywhere and from any thread; return its verdict."""
        self.refuse_child()
        if isinstance(error, UsageError) and self._node_group.closed:  # a thread outlived it
            left = f"{self._describe()} lost rank {self._rank}, which left the group"
            error = PeerLostError(left, [self._rank])
        if self.error is None:
            told = with_advice(self.attendance.complete(error))
            self.error = found = self._board.decide_verdict(told, self.sequence)
            ignore_errors(lambda: self._node_group.abort(text_of_error(found, _NODE_TEXT)))
            is_silent = self._board.is_silent
            if self._serves_store or (is_silent and self._fallback.tell(found, self.sequence)):
                time.sleep(_KEPT_S)
        return self.error

    def of_node(self, error: FastcollError, what: str = "") -> FastcollError:
        """Return an error of this node's ranks with their numbers in the whole group.

        `what` failed; by default the call that was begun last.
        """
        if isinstance(error, DesyncError):
            here = self._node_map.nodes[self._node]
            names = f", whose ranks {list(range(len(here)))} are ranks {list(here)} of the group"
            return DesyncError(f"{self._describe(what)}{names}: {error}")
        if not isinstance(error, CollectiveTimeout | PeerLostError | AbortedError):
            return error
        if verdict := error_from_text(str(error)):
            return verdict
        local = error.ranks
        ranks = [self._node_map.nodes[self._node][one] for one in local]
        names = f", whose ranks {list(local)} are ranks {ranks} of the group" if local else ""
        return type(error)(f"{self._describe(what)}{names}: {error}", ranks)


def _listen() -> None:
    for watch in _listening.copy():
        ignore_errors(watch.listen)


_listening: list[Watch] = []  # each once for each call that is on its way
_C.set_wait_listener(_listen)


def with_advice(error: FastcollError) -> FastcollError:
    """Return an error with the sentences that end every verdict; it may quote another one."""
    text = str(error).replace(_OVER, "")
    if isinstance(error, CollectiveTimeout) and _IF_SLOW not in text:
        text += _IF_SLOW
    text += _OVER
    ranks = [error.ranks] if hasattr(error, "ranks") else []
    return type(error)(text, *ranks)


def ignore_errors(task: Callable[[], object]) -> None:
    """Do something whose failure changes nothing any more."""
    try:
        task()
    except FastcollError:
        return
