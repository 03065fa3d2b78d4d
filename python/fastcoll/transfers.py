# SPDX-License-Identifier: Apache-2.0
"""Sends and receives: the handle a user gets, and who moves them while nobody waits.

Decides which thread drives the open transfers of a group: whoever waits for one, else one thread
of the process's pool. Must not know how bytes travel.
"""

import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from fastcoll import _C
from fastcoll.errors import CollectiveTimeout, FastcollError, UsageError
from fastcoll.memory.array import Array, ArrayView, check_output, copy_back, dense_copy, view
from fastcoll.reliability.limits import call_limit_s
from fastcoll.work import run_in_pool

ANY = -1  # csrc/cpu/p2p.h
_MOST_TAG = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCall:
    """A send or a receive as the user asked for it; a peer of None is any rank."""

    sends: bool
    tensor: Array
    peer: object
    tag: object = 0
    timeout_s: float | None = None


class TransferWork:
    """A send or a receive that was started."""

    def __init__(self, group: _C.Group, call: TransferCall) -> None:
        name = "dst" if call.sends else "src"
        peer = _checked_peer(call.peer, name, group.world_size, call.sends)
        array = view(call.tensor, "tensor")
        if not call.sends:
            check_output(array, "tensor")
        self._group = group
        self._array = array
        self._dense: ArrayView | None = array if array.dense else dense_copy(array, fill=call.sends)
        self._receives = not call.sends
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._transfer = group.post(
            call.sends,
            peer,
            _checked_tag(call.tag),
            int(array.dtype),
            array.numel,
            self._dense.ptr,
            call_limit_s(call.timeout_s),
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
        return self._transfer.peer

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


class Transfers:
    """The transfers of one group that nobody waits for yet."""

    def __init__(self, group: _C.Group) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._open: list[TransferWork] = []
        self._num_posted = 0
        self._has_thread = False

    def start(self, calls: Sequence[TransferCall]) -> list[TransferWork]:
        """Start transfers; they move on whether or not somebody waits for them."""
        works = [TransferWork(self._group, call) for call in calls]
        if not all(work._transfer.done for work in works):
            with self._lock:
                # Kept until they are over: the user may drop a Work, and its tensor with it.
                self._open = [work for work in (*self._open, *works) if not work._transfer.done]
                self._num_posted += 1
                if not self._has_thread:
                    run_in_pool(self._drive)
                    self._has_thread = True
        return works

    def run(self, call: TransferCall) -> TransferWork:
        """Start a transfer and wait until it is complete."""
        work = TransferWork(self._group, call)
        work.wait()
        return work

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


def _checked_peer(peer: object, name: str, world_size: int, sends: bool) -> int:
    if peer is None and not sends:
        return ANY
    try:
        rank = operator.index(peer)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} must be a rank, not {peer!r}") from None
    if not 0 <= rank < world_size:
        raise UsageError(f"{name}={rank} is not a rank of a group of {world_size}")
    return rank


def _checked_tag(tag: object) -> int:
    try:
        number = operator.index(tag)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"tag must be an integer, not {tag!r}") from None
    if not 0 <= number < _MOST_TAG:
        raise UsageError(f"tag={number} must be from 0 to 2**32 - 1")
    return number
