# SPDX-License-Identifier: Apache-2.0
# torch's stubs know several forms of each method; torch itself calls the one that is here.
# mypy: disable-error-code="override"
"""A call of a communicator as torch sees it.

Decides which methods torch gets for a call that was started. Must not know groups.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import _record_function_with_args_exit as end_event

from fastcoll.calls.futures import complete, follow
from fastcoll.calls.pool import run_in_pool
from fastcoll.calls.transfer_work import GpuTransferWork, TransferBetween, TransferWork
from fastcoll.calls.work import Work
from fastcoll.errors import FastcollError

_TRANSFERS = TransferWork, TransferBetween, GpuTransferWork


class TorchWork(dist.Work):
    """A call of a communicator as torch sees it."""

    op_type = 100  # the number in c10d::OpType: UNKNOWN, where torch's side is a compiled handle

    def __init__(self, works: Sequence[Work | TransferWork]) -> None:
        super().__init__()
        self._works = works
        self._recorded: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the calls are complete; raises their error. A timeout of 0 is no limit."""
        for work in self._works:
            work.wait(timeout)
        if self._recorded is not None:
            self._recorded.wait()
        return True

    def end_with(self, event: torch.Tensor) -> None:
        """Let the profiler's event end when the calls are complete; `wait` waits for that too.

        The event always ends in another thread than this one: by that torch tells that a call was
        asynchronous.

        Args:
            event: torch's handle of the event, which is a tensor.
        """
        caller = threading.get_ident()
        calls, recorded = self.get_future(), torch.futures.Future[Any]()

        def end() -> None:
            end_event(event)
            complete(recorded, calls.value)

        def end_in_pool(_: object) -> None:
            if threading.get_ident() != caller:
                end()
                return
            try:
                run_in_pool(end)
            except FastcollError:  # the interpreter ends
                end()

        self._recorded = recorded
        calls.add_done_callback(end_in_pool)

    def synchronize(self) -> None:
        """Do as `wait`: there are no streams."""
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        """Return the first error that a call raised, or None."""
        return next((error for work in self._works if (error := work.exception())), None)

    def result(self) -> list[torch.Tensor]:
        return [output for work in self._works for output in work.result()]  # type: ignore[misc]

    def source_rank(self) -> int:
        """Return the group rank of the sender of a receive; torch's error for other calls."""
        if len(self._works) == 1 and isinstance(work := self._works[0], _TRANSFERS):
            return work.source_rank()
        return super()._source_rank()

    _source_rank = source_rank

    def _get_op_type(self) -> int:
        return self.op_type

    def get_future(self) -> torch.futures.Future[Any]:
        if self._recorded is not None:
            return self._recorded
        if len(self._works) == 1:
            return self._works[0].get_future()
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return follow(every, self.result)
