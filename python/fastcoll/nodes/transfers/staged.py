# SPDX-License-Identifier: Apache-2.0
"""Sends and receives of tensors on GPUs within a node, of a group over several nodes.

They are the node's transfers, of copies in the CPU's memory. So a tensor on a GPU and one on the
CPU match, and no collective setup of the GPUs is needed. Decides the order: the node has a receive
from the call on, and a send once its copy is there. Later sends on the same way wait for that copy.
Must not know how the node moves bytes, nor how a tensor's pieces get to the CPU.

All messages of CUDA tensors over nodes go through the host; not yet run on a GPU. NCCL compares
neither tags nor sizes and waits for ever. On this way a message has the limits and errors of the
CPU's, and may end on a CPU. The price is two copies over PCIe through 16 MiB of pinned memory.
Kernels would be quicker within a node. But their setup is a collective step, which a send can't be;
a group of that node has them. The host waits for the stream, so no transfer delays another one in
the copying stream. A receive from any rank into a GPU is refused, as on one node.
"""

import threading
from dataclasses import replace
from functools import partial

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.calls.transfer_work import TransferBetween, TransferWork
from fastcoll.calls.transfers import Transfer
from fastcoll.nodes.transfers.channels import Ends, InOrder
from fastcoll.nodes.transfers.local import LocalTransfers
from fastcoll.nodes.transfers.payloads import GpuPayload, HostPayload, copy_on_host
from fastcoll.nodes.verdict.backoff import wait_until
from fastcoll.nodes.verdict.watch import ignore_errors


class StagedTransfers:
    """The transfers of one rank that go through copies on the CPU."""

    def __init__(self, ends: Ends, local: LocalTransfers) -> None:
        self._ends = ends
        self._local = local
        self._lock = threading.RLock()  # a signal handler may start transfers, too
        self._ways: dict[tuple[bool, int, int], Way] = {}
        self._is_closed = False

    def takes(self, transfer: Transfer) -> bool:
        """Return whether it can't go to the node at once; with the node's number of the peer.

        A send of the CPU's memory comes behind those of a GPU's, whose copies may not be there yet.
        """
        if transfer.array.device >= 0:
            return True
        with self._lock:
            return transfer.sends and (True, transfer.peer, transfer.tag) in self._ways

    def start(self, transfer: Transfer, payload: GpuPayload | None) -> TransferBetween:
        """Queue a transfer with the node's number of the peer; `payload` if it is on a GPU."""
        key = transfer.sends, transfer.peer, transfer.tag
        with self._lock:
            if key not in self._ways:
                made = Way(self._ends, self._local)
                self._ways.setdefault(key, made).is_closed = self._is_closed
            return self._ways[key].start(transfer, payload)

    def close(self) -> None:
        """End the transfers that are not complete."""
        with self._lock:
            self._is_closed = True
            for way in self._ways.values():
                way.is_closed = True
        for way in list(self._ways.values()):
            way.close()


class Way(InOrder):
    """The sends to one rank with one tag, or the receives."""

    def __init__(self, ends: Ends, local: LocalTransfers) -> None:
        super().__init__(ends)
        self._local = local

    def start(self, transfer: Transfer, payload: GpuPayload | None) -> TransferBetween:
        rank = self._local.ranks[transfer.peer]
        posted: TransferWork | None = None
        if payload is None:
            run = partial(self._carry, transfer)
        elif transfer.sends:
            run = partial(self._send, transfer, payload)
        else:
            host = copy_on_host(transfer)
            posted = self._post(host)
            run = partial(self._receive, transfer, payload, host, posted)

        name = self._ends.name(transfer.sends, rank, transfer.tag)

        def run_in_turn() -> int:
            try:
                self._check()
                run()
            except Exception as error:
                self._fail(name, error)
                raise
            return rank

        announced = partial(self._ends.waits.announced, rank, transfer.sends)
        on_interrupt = partial(self._ends.give_up, name)
        work = TransferBetween(run_in_turn, transfer, on_interrupt, announced)
        try:
            self._queue.put(work)
        except BaseException as error:  # the next receive gets the message
            if posted is not None and (self._queue.take_back(work, error) or work.is_completed()):
                ignore_errors(posted.withdraw)
            raise
        return work

    def _carry(self, transfer: Transfer) -> None:
        self._await(self._post(transfer))

    def _send(self, transfer: Transfer, payload: GpuPayload) -> None:
        deadline = self._ends.deadline(transfer)
        host = copy_on_host(transfer)
        with payload.here():
            self._copy(transfer, payload, host, deadline)
        self._await(self._post(replace(host, limit_s=max(deadline.left_s(), 0.001))))

    def _receive(
        self, transfer: Transfer, payload: GpuPayload, host: Transfer, local: TransferWork
    ) -> None:
        try:
            self._await(local)
        finally:
            if not local.is_completed():
                ignore_errors(local.withdraw)
        with payload.here():
            self._copy(transfer, payload, host, self._ends.deadline(transfer))

    def _copy(
        self, transfer: Transfer, payload: GpuPayload, host: Transfer, deadline: Deadline
    ) -> None:
        """Copy all pieces to the CPU, or from there."""
        peer = self._local.ranks[transfer.peer]
        name = self._ends.name(transfer.sends, peer, transfer.tag)
        wait = self._ends.for_gpu(name, self._check, deadline)
        payload.move_all(HostPayload(host), wait)

    def _post(self, transfer: Transfer) -> TransferWork:
        return self._local.start_checked([transfer])[0]

    def _await(self, local: TransferWork) -> None:
        """Wait for the node, whose limit ends it."""
        wait_until(local.is_completed, self._check)
        local.wait()
