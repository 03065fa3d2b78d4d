# SPDX-License-Identifier: Apache-2.0
"""Sends and receives between two ranks of different nodes.

Each pair of ranks and each tag is a channel: a carrier of two ranks, made when both first use it.
Messages follow each other on it. A message is a header, then its bytes. A carrier costs threads,
and a program may have a new tag for each message. So a rank with many carriers ends one behind its
message, whose header says so; the next message has another one. Decides which receive gets a
message and how a wait ends. Must not know how bytes travel.

Each pair and tag has a carrier for two reasons. A wait of torch for a Gloo receive can't be polled,
nor ended without closing connections. Gloo also ends a process that gets more bytes than it
expects. So a message is a broadcast between two ranks, behind a header that gives its size. No
other ranks are connected. A sender writes in the store that it begins, and a receive from any rank
connects to those senders (any_source.py).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.distributed import Store

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.node_map import Seat
from fastcoll.calls.limits import GROUP_LIMIT
from fastcoll.calls.settings import Settings
from fastcoll.calls.transfer_work import TransferBetween
from fastcoll.calls.transfers import ANY, Transfer
from fastcoll.calls.work import CallQueue
from fastcoll.errors import CollectiveTimeout, DesyncError, FastcollError, PeerLostError, UsageError
from fastcoll.nodes.carriers.carrier import Carrier, MakeCarrier, Started
from fastcoll.nodes.carriers.given_up import give_up, let_go
from fastcoll.nodes.transfers.payloads import HostPayload, Payload, WaitFor
from fastcoll.nodes.transfers.turns import Turns
from fastcoll.nodes.verdict.backoff import wait_until
from fastcoll.nodes.verdict.board import Board
from fastcoll.nodes.verdict.lookout import Lookout
from fastcoll.nodes.verdict.store import PollingStore
from fastcoll.nodes.verdict.wait_chain import Waits
from fastcoll.nodes.verdict.watch import Watch
from fastcoll.text import error_in_words
from fastcoll.types import DType

# The time for the last bytes of a peer that has left: 4 MB over 10 Mbit/s.
_LAST_BYTES_S = 3.0
# Memory that a GPU may use after an error; gone with the process.
_abandoned: list[object] = []
MOST_CARRIERS = 64  # that a rank keeps to send on; those of its senders are theirs to end


def senders_key(target: int, tag: int) -> str:
    """Return the board's key of the ranks that have begun to send to a rank with a tag."""
    return f"to {target}, tag {tag}"


@dataclass(frozen=True)
class Ends:
    """The objects that all channels of a group share."""

    seat: Seat
    make: MakeCarrier
    store: Store  # the store over which they are made
    board: Board  # the board on which a sender writes that it has begun to send
    watch: Watch  # knows the group's verdict
    waits: Waits  # the chain of waiting ranks
    settings: Settings  # with the limit of a transfer that has none of its own
    lookout: Callable[[], Lookout]  # begins a long wait's look at its peers
    # The channels on which this rank sends that have a carrier.
    sending: set["Channel"] = field(default_factory=set)
    # The last carriers that were ended.
    ended: deque[Carrier] = field(default_factory=lambda: deque(maxlen=16))

    def deadline(self, transfer: Transfer) -> Deadline:
        """Return when a transfer that starts to run now is late."""
        limit = self.settings.timeout_s if transfer.limit_s == GROUP_LIMIT else transfer.limit_s
        return Deadline(limit)

    def check(self, is_closed: bool) -> None:
        """Raise the error that ends a wait, if there is one."""
        if is_closed:
            raise UsageError("the group was destroyed before the transfer was complete")
        if verdict := self.watch.verdict_to_raise():
            raise verdict

    def name(self, sends: bool, peer: int, tag: int) -> str:
        """Return the name of a transfer of this rank in an error."""
        verb, to = ("send", "to") if sends else ("recv", "from")
        whom = "any rank" if peer == ANY else f"rank {peer}"
        return f"{verb} {to} {whom} with tag {tag} (seen by rank {self.seat.rank})"

    def give_up(self, name: str, error: BaseException) -> None:
        """End the group by an error of this rank's own: no memory, or a signal during a wait."""
        rank = self.seat.rank
        gave_up = f"{name}: rank {rank} gave it up: {error_in_words(error)}"
        self.watch.fail(PeerLostError(gave_up, [rank]))

    def for_gpu(self, name: str, check: Callable[[], None], deadline: Deadline) -> WaitFor:
        """Return how a transfer waits for this rank's GPU."""

        def wait(is_over: Callable[[], bool]) -> None:
            if not wait_until(is_over, check, deadline):
                raise CollectiveTimeout(
                    f"{name} waited {deadline.limit_s:g} s for its own GPU, whose stream has still "
                    "to do what it was given before",
                    [self.seat.rank],
                )

        return wait


class InOrder:
    """Transfers that run one after another, first in, first out; the group does not count them."""

    is_closed = False

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._queue = CallQueue(self)

    def close(self) -> None:
        """End the transfers that are not complete."""
        self.is_closed = True
        self._queue.join()

    def has_open(self) -> bool:
        """Return whether transfers are not over."""
        return self._queue.has_calls()

    def _check(self) -> None:
        self._ends.check(self.is_closed)

    def _fail(self, name: str, error: Exception) -> None:
        """End the group by a transfer's error; raise the group's, unless it is this rank's own."""
        if self.is_closed:
            return
        if isinstance(error, FastcollError):
            raise self._ends.watch.fail(error) from error
        self._ends.give_up(name, error)

    # The methods that the queue needs of its owner:

    def idle(self) -> bool:
        return False

    def async_begin(self) -> None:
        return

    async_end = await_native = async_begin


class Channel(InOrder):
    """Messages with one tag from one rank to another one."""

    def __init__(self, ends: Ends, transfer: Transfer, peer: int, turns: Turns) -> None:
        super().__init__(ends)
        self.peer = peer
        self.sends, self._tag = transfer.sends, transfer.tag
        self._turns = turns
        self._carrier: Carrier | None = None
        self._num_carriers = 0  # so far
        self.num_begun = 0  # those that the sender began with, as receives from any rank heard
        self._header: tuple[torch.Tensor, Started] | None = None  # asked for, of the next message
        self._is_lost = False

    def start(self, transfer: Transfer, payload: Payload | None = None) -> TransferBetween:
        """Queue a transfer; `payload` if it is on a GPU."""

        def run() -> int:
            try:
                self.carry_out(transfer, payload)
            finally:
                self._turns.leave(transfer)
            return self.peer

        announced = partial(self._ends.waits.announced, self.peer, self.sends)
        work = TransferBetween(run, transfer, partial(self._ends.give_up, self._name()), announced)
        try:
            with self._turns.starting:
                if not self.sends:
                    self._turns.enter(transfer)
                self._queue.put(work)
        except BaseException as error:  # there is no thread, or a signal handler raised it
            if self._queue.take_back(work, error) or work.is_completed():
                self._turns.leave(transfer)
            raise
        return work

    def close(self) -> None:
        super().close()
        self._keep_listening()
        carrier, self._carrier = self._carrier, None
        if carrier is not None and self._ends.watch.error is None:
            carrier.close()
        elif carrier is not None:
            give_up(carrier)

    def _keep_listening(self) -> None:
        if self._carrier is not None and self._header is not None:
            give_up(self._carrier, self._header)
            self._carrier = None
            let_go()

    __del__ = _keep_listening  # where a program drops its group without an end

    def is_offered(self, deadline: Deadline) -> bool:
        """Return whether the next message has begun to come; for the receive whose turn it is.

        A rank that has gone offers nothing, nor does one that has still to begin with a carrier.
        """
        if self._is_lost or (self._carrier is None and self.num_begun <= self._num_carriers):
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

    def carry_out(
        self, transfer: Transfer, payload: Payload | None = None, deadline: Deadline | None = None
    ) -> None:
        """Send a message, or receive one when it is this receive's turn, here and now."""
        array = transfer.array
        ends_carrier = transfer.sends and len(self._ends.sending - {self}) >= MOST_CARRIERS
        try:
            self._check()
            payload = payload or HostPayload(transfer)
            words = [array.dtype, array.numel, payload.piece_bytes, ends_carrier]
            header = torch.tensor(words, dtype=torch.int64, device="cpu")
            if transfer.sends:
                deadline = deadline or self._ends.deadline(transfer)
                self._send(header, payload, deadline)
            else:
                # Receives from any rank that were started before; their limits end that.
                wait_until(lambda: self._turns.is_next(transfer, self.peer), self._check)
                deadline = deadline or self._ends.deadline(transfer)
                told, started = self._listen(deadline)
                self._wait([started], deadline)
                self._header = None
                expected, found = header.tolist(), told.tolist()
                self._compare(expected[:2], found[:2])
                payload = payload.cut_as(found[2])
                self._receive(payload, deadline)
                ends_carrier = found[3]
            if ends_carrier:
                self._end_carrier(deadline)
        except Exception as error:
            self._give_up(transfer, payload)
            self._fail(self._name(), error)
            raise

    def _send(self, header: torch.Tensor, payload: Payload, deadline: Deadline) -> None:
        carrier = self._made(deadline)
        for_gpu = self._ends.for_gpu(self._name(), self._check, deadline)
        under_way = deque([carrier.broadcast(header, 0)])
        with payload.here():
            for index in range(payload.num_pieces):
                while len(under_way) >= payload.num_slots:
                    self._wait([under_way.popleft()], deadline)
                payload.move(index, for_gpu)
                under_way.append(carrier.broadcast(payload.piece(index), 0))
        self._wait(under_way, deadline)

    def _receive(self, payload: Payload, deadline: Deadline) -> None:
        carrier = self._made(deadline)
        for_gpu = self._ends.for_gpu(self._name(), self._check, deadline)
        coming: deque[Started] = deque()
        num_asked = 0
        with payload.here():
            for index in range(payload.num_pieces):
                while num_asked < min(index + payload.num_slots, payload.num_pieces):
                    coming.append(carrier.broadcast(payload.piece(num_asked), 0))
                    num_asked += 1
                self._wait([coming.popleft()], deadline)
                payload.move(index, for_gpu)
            payload.finish(for_gpu)

    def _listen(self, deadline: Deadline) -> tuple[torch.Tensor, Started]:
        """Return the header of the next message, which may still be coming."""
        carrier = self._made(deadline)
        if self._header is None:
            header = torch.zeros(4, dtype=torch.int64, device="cpu")
            self._header = header, carrier.broadcast(header, 0)
        return self._header

    def _made(self, deadline: Deadline) -> Carrier:
        if self._carrier is None:
            mine, ends = self._ends.seat.rank, self._ends
            source, target = (mine, self.peer) if self.sends else (self.peer, mine)
            left_s = max(deadline.left_s(), 0.001)
            if self.sends:
                ends.board.append(senders_key(target, self._tag), str(source), left_s)
            name = f"from {source} to {target}, tag {self._tag}, carrier {self._num_carriers}"
            with ends.lookout() as lookout:
                look = partial(self._look, lookout)
                store = PollingStore(ends.store, name, deadline, look, (source, target), mine)
                self._carrier = self._connected(store, deadline)
            self._num_carriers += 1
            if self.sends:
                ends.sending.add(self)
        return self._carrier

    def _look(
        self, lookout: Lookout, transfer: Started | None = None, deadline: Deadline | None = None
    ) -> None:
        """Check a wait for the peer, which no connection may tell to be gone.

        Gloo does not tell the transfer whose bytes were in flight when a connection broke. The
        last bytes of a peer that has left may be in flight, too, over a slow network.
        """
        self._check()
        if lookout.are_gone([self.peer]):
            error = lookout.error(self._name(), [self.peer])
            left_s = _LAST_BYTES_S if deadline is None else min(_LAST_BYTES_S, deadline.left_s())
            last = Deadline(left_s)
            if transfer is None or not wait_until(transfer.is_completed, self._check, last):
                raise error

    def _connected(self, store: PollingStore, deadline: Deadline) -> Carrier:
        try:
            store.meet()
            return self._ends.make(store, int(not self.sends), 2, deadline.left_s())
        except RuntimeError as error:
            self._check()  # torch may have wrapped the error that ended the wait
            if isinstance(error, FastcollError):
                raise
            raise self._unconnected(deadline, error) from error

    def _unconnected(self, deadline: Deadline, reason: RuntimeError) -> FastcollError:
        """Return the error of a carrier that could not be made, by this rank or by the peer."""
        if deadline.passed():
            return self._late(deadline)
        ranks = sorted((self._ends.seat.rank, self.peer))
        return self._ends.watch.await_verdict() or PeerLostError(
            f"{self._name()}: one of ranks {ranks} can't connect: {reason}", ranks
        )

    def _end_carrier(self, deadline: Deadline) -> None:
        """End the carrier, once the receiver has said that it has all.

        A connection may drop what is in flight when it goes. So a few that were ended are
        kept: what a receiver says last is there long before its connection goes.
        """
        carrier = self._made(deadline)
        word = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._wait([carrier.broadcast(word, 1)], deadline)
        self._carrier = None
        carrier.close()
        self._ends.ended.append(carrier)
        self._ends.sending.discard(self)

    def _wait(self, transfers: Sequence[Started], deadline: Deadline) -> None:
        for transfer in transfers:
            with self._ends.lookout() as lookout:
                look = partial(self._look, lookout, transfer, deadline)
                if not wait_until(transfer.is_completed, look, deadline):
                    raise self._late(deadline)
            try:
                transfer.wait()
            except RuntimeError as error:
                raise self._ends.watch.await_verdict() or PeerLostError(
                    f"{self._name()} lost its connection: {error}", [self.peer]
                ) from error

    def _late(self, deadline: Deadline) -> FastcollError:
        if verdict := self._ends.watch.await_verdict():
            return verdict
        told, rank = self._ends.waits.follow(self.peer)
        return CollectiveTimeout(
            f"{self._name()} waited {deadline.limit_s:g} s for rank {self.peer}, which did not "
            f"{'receive' if self.sends else 'send'} it{told}",
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
        return self._ends.name(self.sends, self.peer, self._tag)

    def _give_up(self, transfer: Transfer, payload: Payload | None) -> None:
        if self._carrier is not None:
            give_up(self._carrier, payload, self._header)
        if transfer.array.device >= 0:
            _abandoned.append(payload)
        self._carrier = self._header = None
