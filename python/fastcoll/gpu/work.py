# SPDX-License-Identifier: Apache-2.0
"""The handles of calls and transfers on a GPU.

Decides how a wait works there. Must not know how calls are started.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from fastcoll.calls.arrays import Array, ArrayView
from fastcoll.calls.foreign import stream_of
from fastcoll.calls.transfer_work import GpuTransferWork
from fastcoll.calls.transfers import Transfer
from fastcoll.calls.work import Work, limit_of_wait
from fastcoll.errors import CollectiveTimeout, FastcollError
from fastcoll.native import _C

_POLL_S = 0.0002


class DeviceSide(Protocol):
    """The GPU side of a group, as far as a handle has to know it."""

    device: int

    def check(self) -> None:
        """Raise the error that broke the group, if one has."""


class KnownSide(DeviceSide, Protocol):
    """One whose calls C++ starts, asynchronous ones in that stream."""

    side_stream: torch.cuda.Stream


@dataclass(frozen=True)
class Started:
    """Something that runs in a stream until an event."""

    event: torch.cuda.Event
    stream: torch.cuda.Stream
    # The stream of the arrays' library, if that is not torch; it waits like torch's.
    behind: torch.cuda.Stream | None = None
    keeps: Sequence[object] = ()  # memory that must live until then
    is_captured: bool = False  # it runs in replays of the graph only, and CUDA never says its end


def beside(
    side: torch.cuda.Stream,
    device: int,
    body: Callable[[torch.cuda.Stream], None],
    arrays: Sequence[ArrayView],
) -> Started:
    """Start something in a stream beside the current one, behind that one's current work.

    `arrays`: the arrays that it uses, whose memory must not be given away before.
    """
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        body(side)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(side)
    for array in arrays:
        if isinstance(array.source, torch.Tensor):
            array.source.record_stream(side)
    # Other libraries know no such thing: the handle keeps their arrays.
    theirs = [array.source for array in arrays if array.stream is not None]
    is_captured = torch.cuda.is_current_stream_capturing()
    return Started(event, side, stream_of(arrays, device), theirs, is_captured)


def await_completion(
    side: DeviceSide, is_completed: Callable[[], bool], timeout: float | timedelta | None
) -> None:
    """Let the program wait for a call, if there is a limit; in a capture nothing is on its way.

    Raises:
        FastcollError: The error that broke the group.
        CollectiveTimeout: `timeout` ran out.
    """
    limit_s = limit_of_wait(timeout)
    if limit_s and torch.cuda.is_current_stream_capturing():
        return
    end = time.monotonic() + (limit_s or 0)
    while limit_s and not is_completed():
        if time.monotonic() > end:
            raise CollectiveTimeout(f"the call is not complete after {limit_s:g} s; it goes on")
        side.check()
        time.sleep(_POLL_S)


def error_of(side: DeviceSide) -> FastcollError | None:
    """Return the error that broke the group; None if none has."""
    try:
        side.check()
    except FastcollError as error:
        return error
    return None


def future_of(
    side: DeviceSide, stream: torch.cuda.Stream, outputs: list[Array]
) -> torch.futures.Future[Any]:
    """Return a future of a call in that stream; its callbacks run in streams that wait."""
    future: torch.futures.Future[Any] = torch.futures.Future(
        devices=[torch.device("cuda", side.device)]
    )
    with torch.cuda.stream(stream):
        future.set_result(outputs)
    return future


class DeviceWork(Work):
    """A call that was started on a GPU with `async_op=True`.

    As with torch's own GPU backends, `wait` makes the current stream wait, not the program. For
    arrays of CuPy's kind the stream that was current there at the call waits, too. Their memory
    lives as long as this handle: keep it until `wait`.
    """

    def __init__(self, group: DeviceSide, started: Started, outputs: list[Array]) -> None:
        self._outputs = outputs
        self._future: torch.futures.Future[Any] | None = None
        self._group = group
        self._started = started
        self._event = started.event
        self._stream = started.stream

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Let the current stream wait for the call.

        Args:
            timeout: Seconds for which the program itself waits; None, 0 or less do not wait.

        Returns:
            True.

        Raises:
            FastcollError: The error that broke the group, if that is known already.
            CollectiveTimeout: `timeout` ran out; the call goes on.
        """
        await_completion(self._group, self.is_completed, timeout)
        torch.cuda.current_stream(self._group.device).wait_event(self._event)
        if self._started.behind is not None:
            self._started.behind.wait_event(self._event)
        self._group.check()
        return True

    def is_completed(self) -> bool:
        """Return whether the call is over, well or not; False in a capture."""
        # A question about an event may invalidate a capture.
        if self._started.is_captured or torch.cuda.is_current_stream_capturing():
            return False
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def exception(self) -> Exception | None:
        """Return the error that broke the group; None while the call runs or if it went well."""
        return error_of(self._group) if self.is_completed() else None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of outputs; its callbacks run in streams that wait."""
        if self._future is None:
            self._future = future_of(self._group, self._stream, self._outputs)
        return self._future


class KnownWork(_C.GpuWork, Work):
    """A call that C++ started on a GPU with `async_op=True`; as `DeviceWork`."""

    __slots__ = ("__weakref__", "_future")
    _future: torch.futures.Future[Any]

    @property
    def _side(self) -> KnownSide:
        side: KnownSide = self._group.device_group  # type: ignore[attr-defined]
        return side

    def _check(self) -> None:
        self._side.check()

    def _wait(self, timeout: float | timedelta | None = None) -> bool:
        await_completion(self._side, self.is_completed, timeout)
        return self.wait()

    def exception(self) -> Exception | None:
        return error_of(self._side) if self.is_completed() else None

    def get_future(self) -> torch.futures.Future[Any]:
        if not hasattr(self, "_future"):
            self._future = future_of(self._side, self._side.side_stream, self._outputs)
        return self._future


class KnownTransferWork(KnownWork, GpuTransferWork):
    """A send or a receive that C++ started on a GPU."""

    __slots__ = ()

    def source_rank(self) -> int:
        return self._peer


_C.set_gpu_works(KnownWork, KnownTransferWork)


class DeviceTransferWork(DeviceWork, GpuTransferWork):
    """A send or a receive that was started on a GPU."""

    def __init__(self, group: DeviceSide, started: Started, transfer: Transfer) -> None:
        super().__init__(group, started, [transfer.array.source])
        self._peer = transfer.peer

    def source_rank(self) -> int:
        return self._peer
