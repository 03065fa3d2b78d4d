# SPDX-License-Identifier: Apache-2.0
"""Sends and receives between two ranks of different nodes.

Each pair of ranks and each tag is a channel: a carrier of two ranks, made when both first use it,
on which messages follow each other. A message is a head that says what comes, then its bytes.
Decides which receive gets a message and what ends a wait. Must not know how bytes travel.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed import Store

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.islands import Seat
from fastcoll.errors import (
    CollectiveTimeout,
    DesyncError,
    FastcollError,
    PeerLostError,
    UsageError,
)
from fastcoll.hierarchical.arrays import as_bytes, tensor_at
from fastcoll.hierarchical.board import Board
from fastcoll.hierarchical.carrier import Carrier, MakeCarrier, Started
from fastcoll.hierarchical.patient_store import PatientStore
from fastcoll.hierarchical.waits import Waits
from fastcoll.hierarchical.watch import Watch
from fastcoll.memory.array import copy_back, dense_copy
from fastcoll.pairs import ANY, Transfer
from fastcoll.reliability.limits import GROUP_LIMIT
from fastcoll.transfers import TransferBetween
from fastcoll.types import DType
from fastcoll.work import CallQueue

LOOK_EVERY_S = 0.1  # for a verdict: each look is a question to the store
LONGEST_PAUSE_S = 1e-3
# What a carrier may still read or write after an error; gone with the process.
_abandoned: list[object] = []


def senders_key(target: int, tag: int) -> str:
    """Return where those who have begun to send to a rank with a tag stand on the board."""
    return f"to {target}, tag {tag}"


@dataclass(frozen=True)
class Ends:
    """What all channels of a group have in common.

    Attributes:
        store: What they are made over.
        board: Where a sender says that it has begun to send.
        watch: Knows the group's verdict.
        waits: Who waits for whom.
        limit_s: Of a transfer that has none of its own.
    """

    seat: Seat
    make: MakeCarrier
    store: Store
    board: Board
    watch: Watch
    waits: Waits
    limit_s: float

    def deadline(self, transfer: Transfer) -> Deadline:
        """Return when a transfer that starts to run now is late."""
        limit = self.limit_s if transfer.limit_s == GROUP_LIMIT else transfer.limit_s
        return Deadline(limit)

    def check(self, is_closed: bool) -> None:
        """Raise what ends a wait."""
        if is_closed:
            raise UsageError("the group was destroyed before the transfer was complete")
        if verdict := self.watch.verdict():
            raise verdict


class Turns:
    """The receives with one tag from other nodes: a message is for the first that it fits.

    So a receive from any rank holds up all that were started after it: what it did not take is for
    none of them. (MPI 4.1, section 3.5.)
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
        """Return whether the next message from `peer` is for this receive."""
        with self._lock:
            return next(one for one in self._open if one.peer in (peer, ANY)) is receive


class Uncounted:
    """What a queue asks of its owner, for one that counts nothing."""

    is_closed = False

    def idle(self) -> bool:
        return False

    def async_begin(self) -> None:
        return

    async_end = await_native = async_begin


class Channel(Uncounted):
    """Messages with one tag from one rank to another one, first in, first out."""

    def __init__(self, ends: Ends, transfer: Transfer, peer: int, turns: Turns) -> None:
        self._ends = ends
        self.peer = peer
        self._sends, self._tag = transfer.sends, transfer.tag
        self._turns = turns
        self._carrier: Carrier | None = None
        self._head: tuple[torch.Tensor, Started] | None = None  # asked for, of the next message
        self._is_lost = False
        self._queue = CallQueue(self)

    def start(self, transfer: Transfer) -> TransferBetween:
        """Queue a transfer."""

        def run() -> int:
            try:
                self.carry_out(transfer)
            finally:
                self._turns.leave(transfer)
            return self.peer

        if not self._sends:
            self._turns.enter(transfer)
        told = partial(self._ends.waits.told, self.peer, self._sends)
        work = TransferBetween(run, transfer, told)
        self._queue.put(work)
        return work

    def close(self) -> None:
        """Leave; transfers that are not complete fail."""
        self.is_closed = True
        self._queue.join()
        if self._carrier is None or self._ends.watch.error is not None:
            return
        if self._head is None:
            self._carrier.close()
        else:
            self._abandon(*self._head)

    def is_offered(self, deadline: Deadline) -> bool:
        """Return whether the next message has begun to come; for the receive whose turn it is.

        A rank that has gone offers nothing.
        """
        if self._is_lost:
            return False
        _, started = self._listen(deadline)
        if not started.is_completed():
            return False
        try:
            started.wait()
        except RuntimeError:
            self._is_lost = True
        return not self._is_lost

    # ---- one message -----------------------------------------------------------------------------

    def carry_out(self, transfer: Transfer, deadline: Deadline | None = None) -> None:
        """Send a message, or receive one when it is this receive's turn, here and now."""
        array = transfer.array
        dense = array if array.dense else dense_copy(array, fill=transfer.sends)
        head = torch.tensor([array.dtype, array.numel], dtype=torch.int64)
        data = as_bytes(tensor_at(dense.ptr, dense.dtype, dense.numel))
        try:
            self._check()
            if transfer.sends:
                deadline = deadline or self._ends.deadline(transfer)
                carrier = self._made(deadline)
                self._wait([carrier.broadcast(head, 0), *self._bytes(carrier, data)], deadline)
            else:
                self._await_turn(transfer)
                deadline = deadline or self._ends.deadline(transfer)
                told, started = self._listen(deadline)
                self._wait([started], deadline)
                self._head = None
                self._compare(head.tolist(), told.tolist())
                self._wait(self._bytes(self._made(deadline), data), deadline)
        except FastcollError as error:
            self._abandon(dense, head, self._head)
            if self.is_closed:
                raise
            raise self._ends.watch.fail(error) from error
        if not transfer.sends and dense is not array:
            copy_back(array, dense)

    @staticmethod
    def _bytes(carrier: Carrier, data: torch.Tensor) -> list[Started]:
        return [carrier.broadcast(data, 0)] if data.numel() > 0 else []

    def _listen(self, deadline: Deadline) -> tuple[torch.Tensor, Started]:
        """Return the head of the next message, which may still be coming."""
        carrier = self._made(deadline)
        if self._head is None:
            head = torch.zeros(2, dtype=torch.int64)
            self._head = head, carrier.broadcast(head, 0)
        return self._head

    def _await_turn(self, transfer: Transfer) -> None:
        """Wait for receives from any rank that were started before; their limits end that."""
        pause_s, next_look = 50e-6, 0.0
        while not self._turns.is_next(transfer, self.peer):
            if (now := time.monotonic()) >= next_look:
                next_look = now + LOOK_EVERY_S
                self._check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _made(self, deadline: Deadline) -> Carrier:
        if self._carrier is None:
            mine, ends = self._ends.seat.rank, self._ends
            source, target = (mine, self.peer) if self._sends else (self.peer, mine)
            left_s = max(deadline.left_s(), 0.001)
            if self._sends:
                ends.board.append(senders_key(target, self._tag), str(source), left_s)
            name = f"from {source} to {target}, tag {self._tag}"
            store = PatientStore(ends.store, name, deadline, self._check, (source, target))
            try:
                store.meet()
                self._carrier = ends.make(store, int(not self._sends), 2, deadline.left_s())
            except RuntimeError as error:
                self._check()  # torch may have wrapped what ended the wait
                if isinstance(error, UsageError):
                    raise
                raise self._late(deadline) from error
        return self._carrier

    def _wait(self, transfers: Sequence[Started], deadline: Deadline) -> None:
        next_look = time.monotonic()
        for transfer in transfers:
            pause_s = 50e-6
            while not transfer.is_completed():
                if (now := time.monotonic()) >= next_look:
                    next_look = now + LOOK_EVERY_S
                    self._check()
                if deadline.passed():
                    raise self._late(deadline)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                transfer.wait()
            except RuntimeError as error:
                raise self._ends.watch.heard() or PeerLostError(
                    f"{self._name()} lost its connection: {error}. Use of this group is over: "
                    "call fastcoll.shrink() or fastcoll.destroy()",
                    [self.peer],
                ) from error

    def _check(self) -> None:
        self._ends.check(self.is_closed)

    def _late(self, deadline: Deadline) -> FastcollError:
        if verdict := self._ends.watch.heard():
            return verdict
        told, rank = self._ends.waits.follow(self.peer)
        return CollectiveTimeout(
            f"{self._name()} waited {deadline.limit_s:g} s for rank {self.peer}, which did not "
            f"{'receive' if self._sends else 'send'} it{told}. Use of this group is over: call "
            "fastcoll.shrink() or fastcoll.destroy()",
            [rank],
        )

    def _compare(self, expected: list[int], found: list[int]) -> None:
        if found != expected:
            sides = [
                f"{numel} elements of {DType(dtype).name}" for dtype, numel in (found, expected)
            ]
            raise DesyncError(
                f"{self._name()} does not fit: rank {self.peer} sent {sides[0]}, rank "
                f"{self._ends.seat.rank} expected {sides[1]}"
            )

    def _name(self) -> str:
        verb, to = ("send", "to") if self._sends else ("recv", "from")
        return f"{verb} {to} rank {self.peer} with tag {self._tag} (rank {self._ends.seat.rank})"

    def _abandon(self, *what: object) -> None:
        _abandoned.append(what)
        if self._carrier is not None:
            self._carrier.abandon()
