# SPDX-License-Identifier: Apache-2.0
"""Sends and receives in a group over several nodes.

Decides the way of each: within a node the node's own transfers, between nodes a channel, and for a
receive from any rank both. Tensors on GPUs go the same ways, through the CPU's memory. Must not
know how messages travel.
"""

import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.calls.arrays import count_writes
from fastcoll.calls.pool import before_end
from fastcoll.calls.transfer_work import LAST_SENDS_S, AnyTransferWork, Transfers, TransferWork
from fastcoll.calls.transfers import (
    ANY,
    Transfer,
    TransferCall,
    check_transfer,
    refuse_wait_for_itself,
)
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.nodes.transfers.any_source import AnySource
from fastcoll.nodes.transfers.channels import Channel, Ends
from fastcoll.nodes.transfers.local import LocalTransfers
from fastcoll.nodes.transfers.payloads import GpuPayload
from fastcoll.nodes.transfers.staged import StagedTransfers
from fastcoll.nodes.transfers.turns import Turns

_living: weakref.WeakSet["NodeTransfers"] = weakref.WeakSet()
# Of the node's part of a receive from any rank, whose own limit ends it first.
_NO_LIMIT_S = 1e9


# A transfer whose arguments are checked; with its payload if it is on a GPU.
_Checked: TypeAlias = tuple[Transfer, GpuPayload | None]


def _not_on_gpus(transfers: Sequence[Transfer], async_op: bool) -> Any:
    raise AssertionError("a tensor on a GPU got to the node")


class NodeTransfers(Transfers):
    """The transfers of one group over several nodes.

    It has no lock: a signal handler may start a transfer between any two steps, and wait for it.
    """

    def __init__(self, ends: Ends, node_group: Any) -> None:
        self._ends = ends
        node_map = ends.seat.node_map
        self._node, _ = node_map.places[ends.seat.rank]
        ranks = node_map.nodes[self._node]
        self._local = LocalTransfers(node_group, _not_on_gpus, ranks, ends)
        self._staged = StagedTransfers(ends, self._local)
        self._is_closed = False
        self._channels: dict[tuple[bool, int, int], Channel] = {}
        self._any: dict[int, AnySource] = {}
        self._turns: dict[int, Turns] = {}
        _living.add(self)

    def start(self, calls: Sequence[TransferCall]) -> list[AnyTransferWork]:
        checked = [self._checked(call) for call in calls]
        count_writes(array for transfer, _ in checked for array in transfer.written())
        return [self._start(one) for one in checked]

    def run(self, call: TransferCall) -> int:
        checked = self._checked(call)
        refuse_wait_for_itself(checked[0], self._ends.seat.rank)
        count_writes(checked[0].written())
        work = self._start(checked, waits=True)
        work.wait()
        return work.source_rank()

    def close(self) -> None:
        """End the transfers that are not complete."""
        self._is_closed = True  # also of those that other threads are just making
        for one in (*self._any.values(), *self._channels.values()):
            one.is_closed = True
        self._staged.close()
        # Receives from any rank use channels, and may just be making one.
        for source in list(self._any.values()):
            source.close()
        for channel in list(self._channels.values()):
            channel.close()

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork, which has none of its threads and perhaps their locks."""
        return self._ends.watch.is_inherited

    def end_receives(self) -> None:
        """End the receives between nodes that are not complete."""
        for one in (*self._any.values(), *self._channels.values()):
            if not (isinstance(one, Channel) and one.sends):
                one.is_closed = True

    def has_open_sends(self) -> bool:
        """Return whether sends between nodes are not complete."""
        return any(one.sends and one.has_open() for one in list(self._channels.values()))

    def end_sends(self) -> None:
        """End the sends between nodes that are not complete."""
        for one in list(self._channels.values()):
            if one.sends:
                one.is_closed = True

    def _checked(self, call: TransferCall) -> _Checked:
        self._ends.watch.refuse_child()
        if self._is_closed or sys.is_finalizing():
            raise UsageError(f'group "{self._ends.watch.name}" was destroyed')
        if self._ends.watch.error is not None:
            raise self._ends.watch.error
        transfer = check_transfer(call, len(self._ends.seat.node_map.places))
        if transfer.array.device < 0:
            return transfer, None
        if transfer.peer == ANY:
            raise UnsupportedError(
                "a receive from any rank can't be had on GPUs, as in a group of one node: name "
                "src, or receive into the CPU's memory"
            )
        return transfer, GpuPayload(transfer)

    def _start(self, checked: _Checked, *, waits: bool = False) -> AnyTransferWork:
        """Start a transfer; `waits`: the caller waits for it at once, and so drives it."""
        transfer, payload = checked
        if transfer.peer == ANY:

            def post() -> TransferWork:
                local = replace(transfer, limit_s=_NO_LIMIT_S, has_other_senders=True)
                return self._local.start_checked([local])[0]

            return self._any_source(transfer.tag).start(transfer, post)
        node, local_rank = self._ends.seat.node_map.places[transfer.peer]
        if node != self._node:
            return self._channel(transfer, transfer.peer).start(transfer, payload)
        local = replace(transfer, peer=local_rank)
        if self._staged.takes(local):
            return self._staged.start(local, payload)
        return self._local.post(local) if waits else self._local.start_checked([local])[0]

    def _any_source(self, tag: int) -> AnySource:
        if tag not in self._any:
            turns = self._turns.setdefault(tag, Turns())
            self._any.setdefault(tag, AnySource(self._ends, tag, turns, self._channel))
        if self._is_closed:
            self._any[tag].is_closed = True
        return self._any[tag]

    def _channel(self, transfer: Transfer, peer: int) -> Channel:
        """Return the channel of a transfer's kind and tag to or from a rank of another node."""
        key = transfer.sends, peer, transfer.tag
        if key not in self._channels:
            turns = self._turns.setdefault(transfer.tag, Turns())
            self._channels.setdefault(key, Channel(self._ends, transfer, peer, turns))
        if self._is_closed:
            self._channels[key].is_closed = True
        return self._channels[key]


def _end_all_transfers() -> None:
    """End the transfers that no rank answers, when the interpreter ends."""
    groups = [group for group in _living if not group.is_inherited]
    for group in groups:
        group.end_receives()
    deadline = Deadline(LAST_SENDS_S)
    while any(group.has_open_sends() for group in groups) and deadline.left_s() > 0:
        time.sleep(0.001)
    for group in groups:
        group.end_sends()


before_end(_end_all_transfers)
