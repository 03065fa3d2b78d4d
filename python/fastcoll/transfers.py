# SPDX-License-Identifier: Apache-2.0
"""Sends and receives: the handle a user gets, and who moves them while nobody waits.

Decides which thread drives the open transfers of a group: whoever waits for one, else one thread
of the process's pool. Must not know how bytes travel.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch

from fastcoll import _C
from fastcoll.calls import check_one_device
from fastcoll.device_work import DeviceTransferWork
from fastcoll.errors import CollectiveTimeout, FastcollError
from fastcoll.memory.array import Array, ArrayView, copy_back, dense_copy
from fastcoll.pairs import Transfer, TransferCall, check_transfer
from fastcoll.work import Work, run_in_pool


class TransferWork:
    """A send or a receive that was started."""

    def __init__(self, group: _C.Group, transfer: Transfer, names: Sequence[int] = ()) -> None:
        """Start it; `names` are what source_rank() calls the ranks of `group`, if not so."""
        array = transfer.array
        self._group = group
        self._names = names
        self._array = array
        self._receives = not transfer.sends
        self._dense: ArrayView | None = array
        if not array.dense:
            self._dense = dense_copy(array, fill=transfer.sends)
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._transfer = group.post(
            transfer.sends,
            transfer.peer,
            transfer.tag,
            int(array.dtype),
            array.numel,
            self._dense.ptr,
            transfer.limit_s,
        )

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait until the transfer is complete.

        Args:
            timeout: Seconds to wait here; None or 0 wait as long as the transfer may take.

        Returns:
            True.

        Raises:
            FastcollError: What went wrong with the transfer.
            CollectiveTimeout: `timeout` ran out; the transfer goes on.
        """
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        try:
            complete = self._group.wait(self._transfer, timeout or 0)
        except FastcollError as error:
            self._error = error
            raise
        if not complete:
            raise CollectiveTimeout(f"the transfer is not complete after {timeout:g} s; it goes on")
        self._bring_back()
        return True

    def _bring_back(self) -> None:
        with self._lock:
            if self._receives and self._dense is not None and self._dense is not self._array:
                copy_back(self._array, self._dense)
            self._dense = None

    def is_completed(self) -> bool:
        """Return whether the transfer is over, well or not."""
        if not self._transfer.done:
            return False
        self.exception()
        return True

    def is_success(self) -> bool:
        """Return whether the transfer is over and went well."""
        return self._transfer.done and self.exception() is None

    def exception(self) -> Exception | None:
        """Return what went wrong; None while the transfer goes on or if it went well."""
        if self._transfer.done and self._error is None and self._dense is not None:
            try:
                self.wait()
            except FastcollError as error:
                return error
        return self._error

    def result(self) -> list[Array]:
        """Wait, then return the tensor."""
        self.wait()
        return [self._array.source]

    def source_rank(self) -> int:
        """Return the group rank that sent what was received here; for complete transfers."""
        peer = self._transfer.peer
        return self._names[peer] if self._names else peer

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of a list of the tensor."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                run_in_pool(self._complete, self._future)
            return self._future

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        try:
            future.set_result(self.result())
        except Exception as error:
            future.set_exception(error)


class TransferBetween(Work):
    """A send or a receive between nodes; it runs in the order of its queue."""

    def __init__(self, run: Callable[[], None], transfer: Transfer) -> None:
        super().__init__(run, [transfer.array.source])
        self._peer = transfer.peer

    def source_rank(self) -> int:
        """Return the group rank that sent what was received here."""
        return self._peer


AnyTransferWork: TypeAlias = TransferWork | DeviceTransferWork | TransferBetween
# Starts transfers on GPUs, in the current stream or (True) beside it.
OnGpus: TypeAlias = Callable[[Sequence[Transfer], bool], Sequence[DeviceTransferWork]]


class Transfers:
    """The transfers of one group that nobody waits for yet."""

    def __init__(self, group: _C.Group, on_gpus: OnGpus, names: Sequence[int] = ()) -> None:
        """Take a group; `names` as in `TransferWork`."""
        self._group = group
        self._names = names
        self._on_gpus = on_gpus
        self._lock = threading.Lock()
        self._open: list[TransferWork] = []
        self._num_posted = 0
        self._has_thread = False

    def start(self, calls: Sequence[TransferCall]) -> list[AnyTransferWork]:
        """Start transfers; they move on whether or not somebody waits for them.

        All on GPUs, or all on the CPU.
        """
        transfers = [check_transfer(call, self._group.world_size) for call in calls]
        if any(transfer.array.device >= 0 for transfer in transfers):
            check_one_device([(one.array, f"tensor {i}") for i, one in enumerate(transfers)])
            return list(self._on_gpus(transfers, True))
        works = [TransferWork(self._group, transfer, self._names) for transfer in transfers]
        if not all(work._transfer.done for work in works):
            with self._lock:
                # Kept until they are over: the user may drop a Work, and its tensor with it.
                self._open = [work for work in (*self._open, *works) if not work._transfer.done]
                self._num_posted += 1
                if not self._has_thread:
                    run_in_pool(self._drive)
                    self._has_thread = True
        return list(works)

    def run(self, call: TransferCall) -> int:
        """Start a transfer and wait until it is complete; return the peer.

        On a GPU the current stream waits.
        """
        transfer = check_transfer(call, self._group.world_size)
        if transfer.array.device >= 0:
            self._on_gpus([transfer], False)
            return transfer.peer
        work = TransferWork(self._group, transfer, self._names)
        work.wait()
        return work.source_rank()

    def _drive(self) -> None:
        while True:
            with self._lock:
                seen = self._num_posted
            self._group.drive()
            with self._lock:
                if seen == self._num_posted:
                    self._open.clear()
                    self._has_thread = False
                    return
