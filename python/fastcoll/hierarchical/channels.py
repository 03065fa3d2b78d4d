# SPDX-License-Identifier: Apache-2.0
"""Sends and receives in a group over several nodes.

Within a node they are the island's. Between nodes each pair of ranks and each tag is a channel: a
carrier of two ranks, made when both first use it, on which messages follow each other. A message is
a head that says what comes, then its bytes. Decides how messages are matched and what ends a wait.
Must not know how bytes travel.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import Store

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.bootstrap.islands import Seat
from fastcoll.errors import (
    CollectiveTimeout,
    DesyncError,
    FastcollError,
    PeerLostError,
    UnsupportedError,
    UsageError,
)
from fastcoll.hierarchical.arrays import as_bytes, tensor_at
from fastcoll.hierarchical.carrier import Carrier, MakeCarrier, Started
from fastcoll.hierarchical.patient_store import PatientStore
from fastcoll.hierarchical.watch import Watch
from fastcoll.memory.array import ArrayView, copy_back, dense_copy
from fastcoll.pairs import ANY, Transfer, TransferCall, check_transfer
from fastcoll.reliability.limits import GROUP_LIMIT
from fastcoll.transfers import AnyTransferWork, TransferBetween, Transfers
from fastcoll.types import DType
from fastcoll.work import CallQueue

_LOOK_EVERY_S = 0.1  # for a verdict: each look is a question to the store
# What a carrier may still read or write after an error; gone with the process.
_abandoned: list[object] = []


@dataclass(frozen=True)
class Ends:
    """What all channels of a group have in common.

    Attributes:
        store: What they are made over.
        watch: Knows the group's verdict.
        limit_s: Of a transfer that has none of its own.
    """

    seat: Seat
    make: MakeCarrier
    store: Store
    watch: Watch
    limit_s: float


class _Channel:
    """Messages with one tag from one rank to another one, first in, first out."""

    def __init__(self, ends: Ends, transfer: Transfer) -> None:
        self.is_closed = False
        self._ends = ends
        self._sends, self._peer, self._tag = transfer.sends, transfer.peer, transfer.tag
        self._carrier: Carrier | None = None
        self._queue = CallQueue(self)

    def start(self, transfer: Transfer) -> TransferBetween:
        """Queue a transfer."""
        work = TransferBetween(lambda: self._carry_out(transfer), transfer)
        self._queue.put(work)
        return work

    def close(self) -> None:
        """Leave; transfers that are not complete fail."""
        self.is_closed = True
        self._queue.join()
        if self._carrier is not None and self._ends.watch.error is None:
            self._carrier.close()

    # What a queue asks of its owner, which counts nothing here.

    def idle(self) -> bool:
        return False

    def async_begin(self) -> None:
        return

    async_end = await_native = async_begin

    # ---- one message -----------------------------------------------------------------------------

    def _carry_out(self, transfer: Transfer) -> None:
        limit_s = self._ends.limit_s if transfer.limit_s == GROUP_LIMIT else transfer.limit_s
        deadline = Deadline(limit_s)
        array = transfer.array
        dense = array if array.dense else dense_copy(array, fill=transfer.sends)
        head = torch.tensor([array.dtype, array.numel], dtype=torch.int64)
        told = head.clone()
        try:
            self._check()
            carrier = self._made(deadline)
            data = as_bytes(tensor_at(dense.ptr, dense.dtype, dense.numel))
            # The sender's two follow each other at once; the receiver looks at the first before.
            self._wait(
                [carrier.broadcast(told, 0), *self._bytes(carrier, data, transfer.sends)], deadline
            )
            if not transfer.sends:
                self._compare(head.tolist(), told.tolist())
                self._wait(self._bytes(carrier, data, True), deadline)
        except FastcollError as error:
            self._abandon(dense, head, told)
            if self.is_closed:
                raise
            raise self._ends.watch.fail(error, in_call=False) from error
        if not transfer.sends and dense is not array:
            copy_back(array, dense)

    @staticmethod
    def _bytes(carrier: Carrier, data: torch.Tensor, now: bool) -> list[Started]:
        return [carrier.broadcast(data, 0)] if now and data.numel() > 0 else []

    def _made(self, deadline: Deadline) -> Carrier:
        if self._carrier is None:
            mine, ends = self._ends.seat.rank, self._ends
            source, target = (mine, self._peer) if self._sends else (self._peer, mine)
            left_s = max(deadline.left_s(), 0.001)
            name = f"from {source} to {target}, tag {self._tag}"
            store = PatientStore(ends.store, name, left_s, self._check)
            try:
                self._carrier = ends.make(store, int(not self._sends), 2, left_s)
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
                    next_look = now + _LOOK_EVERY_S
                    self._check()
                if deadline.passed():
                    raise self._late(deadline)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1e-3)
            try:
                transfer.wait()
            except RuntimeError as error:
                raise self._ends.watch.heard() or PeerLostError(
                    f"{self._name()} lost its connection: {error}. Use of this group is over: "
                    "call fastcoll.shrink() or fastcoll.destroy()",
                    [self._peer],
                ) from error

    def _check(self) -> None:
        if self.is_closed:
            raise UsageError("the group was destroyed before the transfer was complete")
        if verdict := self._ends.watch.verdict():
            raise verdict

    def _late(self, deadline: Deadline) -> FastcollError:
        return self._ends.watch.heard() or CollectiveTimeout(
            f"{self._name()} waited {deadline.limit_s:g} s for rank {self._peer}, which did not "
            f"{'receive' if self._sends else 'send'} it. Use of this group is over: call "
            "fastcoll.shrink() or fastcoll.destroy()",
            [self._peer],
        )

    def _compare(self, expected: list[int], found: list[int]) -> None:
        if found != expected:
            sides = [
                f"{numel} elements of {DType(dtype).name}" for dtype, numel in (found, expected)
            ]
            raise DesyncError(
                f"{self._name()} does not fit: rank {self._peer} sent {sides[0]}, rank "
                f"{self._ends.seat.rank} expected {sides[1]}"
            )

    def _name(self) -> str:
        verb, to = ("send", "to") if self._sends else ("recv", "from")
        return f"{verb} {to} rank {self._peer} with tag {self._tag} (rank {self._ends.seat.rank})"

    def _abandon(self, dense: ArrayView, *tensors: torch.Tensor) -> None:
        _abandoned.append((dense, tensors))
        if self._carrier is not None:
            self._carrier.abandon()


def _no_gpus(transfers: Sequence[Transfer], async_op: bool) -> Any:
    raise UnsupportedError(
        "tensors on GPUs are not supported in a group over several nodes: pass .cpu(), or make a "
        "group of each node's ranks with new_group()"
    )


class NodeTransfers(Transfers):
    """The transfers of one group over several nodes."""

    def __init__(self, ends: Ends, island: Any) -> None:
        self._ends = ends
        islands = ends.seat.islands
        self._node, _ = islands.places[ends.seat.rank]
        self._local = Transfers(island, _no_gpus, islands.nodes[self._node])
        self._channels: dict[tuple[bool, int, int], _Channel] = {}
        self._lock = threading.Lock()

    def start(self, calls: Sequence[TransferCall]) -> list[AnyTransferWork]:
        """Start transfers; they move on whether or not somebody waits for them."""
        checked = [(call, self._checked(call)) for call in calls]
        works: list[AnyTransferWork] = []
        for call, transfer in checked:
            node, local_rank = self._ends.seat.islands.places[transfer.peer]
            if node == self._node:
                works += self._local.start([replace(call, peer=local_rank)])
            else:
                works.append(self._channel(transfer).start(transfer))
        return works

    def run(self, call: TransferCall) -> int:
        """Start a transfer and wait until it is complete; return the peer."""
        transfer = self._checked(call)
        node, local_rank = self._ends.seat.islands.places[transfer.peer]
        if node == self._node:
            self._local.run(replace(call, peer=local_rank))
        else:
            self._channel(transfer).start(transfer).wait()
        return transfer.peer

    def close(self) -> None:
        """End what is not complete."""
        with self._lock:
            for channel in self._channels.values():
                channel.is_closed = True
            for channel in self._channels.values():
                channel.close()

    def _checked(self, call: TransferCall) -> Transfer:
        transfer = check_transfer(call, len(self._ends.seat.islands.places))
        if transfer.peer == ANY:
            raise UnsupportedError(
                "recv from any rank is not supported in a group over several nodes: name src"
            )
        if transfer.array.device >= 0:
            _no_gpus([transfer], False)
        return transfer

    def _channel(self, transfer: Transfer) -> _Channel:
        key = transfer.sends, transfer.peer, transfer.tag
        with self._lock:
            if key not in self._channels:
                self._channels[key] = _Channel(self._ends, transfer)
            return self._channels[key]
