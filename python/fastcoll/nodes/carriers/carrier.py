# SPDX-License-Identifier: Apache-2.0
"""The carrier of a lane, which moves bytes between nodes, as the phases of a call see it.

Decides the operations of a carrier. Must not know the meaning of the bytes, nor how long to wait
for them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

import torch
from torch.distributed import Store

from fastcoll.types import DType, Op


class Started(Protocol):
    """A transfer under way; torch's Work is one."""

    def is_completed(self) -> bool:
        """Return whether it is over, well or not."""

    def wait(self) -> object:
        """Wait; raises RuntimeError if something went wrong."""


class _Known:
    """A transfer that its carrier knows of until it is seen to be over."""

    def __init__(self, known: "set[_Known]", arguments: object) -> None:
        self.started: Started | None = None
        self.error: RuntimeError | None = None
        self.arguments: object = arguments  # kept where a part of it may have been started
        self._known = known
        known.add(self)

    def is_completed(self) -> bool:
        if self.started is not None and not self.started.is_completed():
            return False
        if self.started is not None:
            self._known.discard(self)
        return True

    def wait(self) -> object:
        if self.started is None:
            assert self.error is not None, "an interrupted start returns no transfer"
            raise self.error
        result = self.started.wait()
        self.is_completed()  # a wait for a GPU's transfer ends before it: the stream waits
        return result


P = ParamSpec("P")
C = TypeVar("C", bound="Carrier")


def starting(
    start: Callable[Concatenate[C, P], Started],
) -> Callable[Concatenate[C, P], Started]:
    """Let an error of a start wait for `wait`, which makes it the error of the group."""

    @wraps(start)
    def run(self: C, /, *args: P.args, **options: P.kwargs) -> Started:
        known = _Known(self.known, (args, options))  # before: a signal may interrupt the start
        try:
            known.started = start(self, *args, **options)
            known.arguments = None
        except RuntimeError as error:
            known.error = error
        return known

    return run


class Carrier(ABC):
    """One lane: as many ranks as there are nodes, numbered like these.

    Each method that starts a transfer is `starting`, and collective over the lane. Tensors are
    contiguous, and stay untouched until the transfer is over.
    """

    # In `all_to_all` a node may give less than another one expects, but not nothing.
    accepts_short = False

    def __init__(self) -> None:
        self.known: set[_Known] = set()  # transfers that are not over, as far as is known

    @abstractmethod
    def reduces(self, dtype: DType, op: Op) -> bool:
        """Return whether `all_reduce` can be asked for this."""

    @abstractmethod
    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_bytes: Sequence[int],
        input_bytes: Sequence[int],
    ) -> Started:
        """Give each node its part of `input` (uint8), and get each one's part of `output`."""

    @abstractmethod
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Started:
        """Put the `input` of all ranks one after another into `output`."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, node: int) -> Started:
        """Copy a node's tensor to all others."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Op) -> Started:
        """Reduce in the carrier's own order and with its own roundings."""

    def has_lost(self, node: int) -> bool:
        """Return whether the connection to a node is known to be broken; from any thread.

        Each look may keep some bytes of memory until the lane is closed. So it is for long waits.
        """
        del node
        return False

    def is_over(self) -> bool:
        """Return whether all transfers have ended, and none failed to start; from any thread."""
        return all(one.started is not None and one.is_completed() for one in list(self.known))

    @abstractmethod
    def abandon(self) -> None:
        """Let go of transfers that never end; the lane is of no use any more. See `give_up`."""

    def resume(self) -> None:
        """Take `abandon` back: all transfers have ended after all."""
        return

    @abstractmethod
    def close(self) -> None:
        """Leave the lane; nothing is under way."""


# Makes a lane from a store of its own, this node, their number, and a limit in seconds. Collective
# over the lane.
MakeCarrier: TypeAlias = Callable[[Store, int, int, float], Carrier]
