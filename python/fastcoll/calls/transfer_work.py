# SPDX-License-Identifier: Apache-2.0
"""Sends and receives: the handle a user gets, and how they are started.

The thread that moves them without a wait is the core's. Must not know how bytes travel.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch

from fastcoll.calls.arrays import Array, copy_back, count_writes, dense_copy
from fastcoll.calls.giving_up import give_up
from fastcoll.calls.modes import hidden_from_modes
from fastcoll.calls.tensors import check_one_device
from fastcoll.calls.transfers import (
    ANY,
    Transfer,
    TransferCall,
    check_transfer,
    refuse_wait_for_itself,
)
from fastcoll.calls.work import NativeHandle, QueuedWork, Work, limit_of_wait
from fastcoll.errors import FastcollError
from fastcoll.native import _C

LAST_SENDS_S = 5.0  # at exit, for the receivers of sends that are under way
LONG_S = 0.1  # a wait between nodes that takes longer is told there
OnInterrupt: TypeAlias = Callable[[BaseException], None]
OnLongWait: TypeAlias = Callable[[], AbstractContextManager[object]]


class TransferWork(_C.TransferWork, NativeHandle, Work):
    """A send or a receive that was started; its quick parts are in C++."""

    __slots__ = ("__weakref__", "_future")
    WHAT = "transfer"

    def withdraw(self) -> bool:
        """End a receive that no message was found for; False if one was, or it failed."""
        return self._withdraw()

    @property
    def _outputs(self) -> list[Array]:  # type: ignore[override]
        return [self._kept]


class StridedTransferWork(TransferWork):
    """A transfer of a strided tensor; a dense copy of it travels."""

    __slots__ = ("_copy_locks", "_is_back")
    # By process: a forked child takes one of its own, as a thread of its parent may have the other.
    _copy_locks: dict[int, threading.RLock]
    _is_back: bool

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """See `TransferWork.wait`; copies received elements to their places."""
        super().wait(timeout)
        # A signal handler may wait for it, too.
        with self._copy_locks.setdefault(os.getpid(), threading.RLock()):
            if not self._is_back:
                with hidden_from_modes():
                    copy_back(*self._kept)
            self._is_back = True
        return True

    def is_completed(self) -> bool:
        """Return whether the transfer is over, well or not."""
        if not super().is_completed():
            return False
        with suppress(FastcollError):
            self.wait()
        return True

    @property
    def _outputs(self) -> list[Array]:  # type: ignore[override]
        return [self._kept[0].source]


def describe(transfer: Transfer) -> str:
    """Return the name of a transfer, as "send to rank 1, tag 0"."""
    way = "send to" if transfer.sends else "recv from"
    peer = "any rank" if transfer.peer == ANY else f"rank {transfer.peer}"
    return f"{way} {peer}, tag {transfer.tag}"


def post(
    group: _C.Group,
    transfer: Transfer,
    kind: type[TransferWork] = TransferWork,
    strided_kind: type[StridedTransferWork] = StridedTransferWork,
) -> TransferWork:
    """Start a transfer that is waited for soon; `kind` and `strided_kind` are its handle's."""
    array = transfer.array
    dense = array if array.dense else dense_copy(array, fill=transfer.sends)
    work = (kind if array.dense else strided_kind)(
        group,
        transfer.sends,
        transfer.peer,
        transfer.tag,
        array.dtype,
        array.numel,
        dense.ptr,
        transfer.limit_s,
        array.source if array.dense else (array, dense),
        transfer.has_other_senders,
    )
    if isinstance(work, StridedTransferWork):
        work._copy_locks = {}
        work._is_back = transfer.sends
    return work


class TransferBetween(QueuedWork):
    """A send or a receive between nodes; it runs in the order of its queue."""

    def __init__(
        self,
        run: Callable[[], int],
        transfer: Transfer,
        on_interrupt: OnInterrupt,
        on_long_wait: OnLongWait = nullcontext,
    ) -> None:
        """Make the handle.

        Args:
            run: Carries the transfer out, in the queue's thread, and returns the peer.
            transfer: The transfer.
            on_interrupt: Told that a signal handler's exception ended a wait for it.
            on_long_wait: The context of a long wait.
        """

        def keep_peer() -> None:
            self._peer = run()

        super().__init__(keep_peer, [transfer.array.source], describe(transfer))
        self._device = transfer.array.device
        self._peer = transfer.peer
        self._on_interrupt = on_interrupt
        self._on_long_wait = on_long_wait

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """See `Work.wait`."""
        # Before a long wait tells the group: a forked child has its parent's connection for that.
        self._refuse_in_child()
        try:
            if limit_of_wait(timeout) is None and not self._done.wait(LONG_S):
                with self._on_long_wait():
                    return super().wait()
            return super().wait(timeout)
        except BaseException as error:
            if not (self._done.is_set() or isinstance(error, FastcollError)):
                self._on_interrupt(error)
            raise

    def _new_future(self) -> torch.futures.Future[Any]:
        if self._device < 0:
            return super()._new_future()
        return torch.futures.Future(devices=[torch.device("cuda", self._device)])

    def source_rank(self) -> int:
        """Return the group rank that sent the message received here; for complete transfers."""
        return self._peer


class GpuTransferWork(Work):
    """A send or a receive on a GPU; gpu/work.py has it."""

    def source_rank(self) -> int:
        """Return the group rank that sends the message received here."""
        raise NotImplementedError


class NoTransfer(QueuedWork):
    """The transfer of a rank that is not in the group: complete from the start."""

    def __init__(self) -> None:
        super().__init__(lambda: None, [], "transfer of a rank that is not in the group")
        self._execute()
        self._finish()

    def source_rank(self) -> int:
        """Return -1: there is no sender."""
        return -1


AnyTransferWork: TypeAlias = TransferWork | GpuTransferWork | TransferBetween | NoTransfer
# Starts transfers on GPUs, in the current stream or (True) beside it.
OnGpus: TypeAlias = Callable[[Sequence[Transfer], bool], Sequence[GpuTransferWork]]


class Transfers:
    """The transfers of one group, also those without a wait for them."""

    def __init__(self, group: _C.Group, on_gpus: OnGpus) -> None:
        self._group = group
        self._on_gpus = on_gpus

    def start(self, calls: Sequence[TransferCall]) -> list[AnyTransferWork]:
        """Start transfers; they move on with or without a wait for them.

        All on GPUs, or all on the CPU.
        """
        transfers = [check_transfer(call, self._group.world_size) for call in calls]
        on_gpus = any(transfer.array.device >= 0 for transfer in transfers)
        if on_gpus:
            check_one_device([(one.array, f"tensor {i}") for i, one in enumerate(transfers)])
        count_writes(array for one in transfers for array in one.written())
        if on_gpus:
            return list(self._on_gpus(transfers, True))
        return list(self.start_checked(transfers))

    def start_checked(self, transfers: Sequence[Transfer]) -> list[TransferWork]:
        """Start transfers of the CPU's memory whose arguments were checked; see `start`."""
        works = [self.post(transfer) for transfer in transfers]
        self._group.drive_transfers()
        return works

    def run(self, call: TransferCall) -> int:
        """Start a transfer and wait until it is complete; return the peer.

        On a GPU the current stream waits.
        """
        group = self._group
        transfer = refuse_wait_for_itself(check_transfer(call, group.world_size), group.rank)
        count_writes(transfer.written())
        if transfer.array.device >= 0:
            self._on_gpus([transfer], False)
            return transfer.peer
        work = self.post(transfer)
        work.wait()
        return work.source_rank()

    def post(self, transfer: Transfer) -> TransferWork:
        """Start one of the CPU's memory that is waited for soon: only that wait moves it on."""
        try:
            return post(self._group, transfer)
        except BaseException as error:
            give_up(self._group, describe(transfer), error)
            raise


_C.set_transfer_work(TransferWork)
