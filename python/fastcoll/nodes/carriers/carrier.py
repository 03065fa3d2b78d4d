# SPDX-License-Identifier: Apache-2.0
"""The carrier of a lane, which moves bytes between nodes, as the phases of a call see it.

Decides the operations of a carrier. Must not know the meaning of the bytes, nor how long to wait
for them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, Protocol, TypeAlias

import torch
from torch.distributed import Store

from fastcoll.types import DType, Op


class Started(Protocol):
    """A transfer under way; torch's Work is one."""

    def is_completed(self) -> bool:
        """Return whether it is over, well or not."""

    def wait(self) -> object:
        """Wait; raises RuntimeError if something went wrong."""


class Failed:
    """A transfer that could not be started: its wait says why, as of any that fails."""

    def __init__(self, error: RuntimeError, *arguments: object) -> None:
        self._error = error
        self._arguments = arguments  # kept: a part of it may have been started

    def is_completed(self) -> bool:
        return True

    def wait(self) -> object:
        raise self._error


P = ParamSpec("P")


def starting(start: Callable[P, Started]) -> Callable[P, Started]:
    """Let an error of a start wait for `wait`, which makes it the error of the group."""

    @wraps(start)
    def run(*args: P.args, **options: P.kwargs) -> Started:
        try:
            return start(*args, **options)
        except RuntimeError as error:
            return Failed(error, args, options)

    return run


class Carrier(ABC):
    """One lane: as many ranks as there are nodes, numbered like these.

    All methods but `has_lost`, `abandon` and `close` are collective over the lane. Tensors are
    contiguous, and stay untouched until the transfer is over. Each method that starts one is
    `starting`.
    """

    # In `all_to_all` a node may give less than another one expects, but not nothing.
    accepts_short = False

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

    @abstractmethod
    def abandon(self) -> None:
        """Let go of transfers that never end; the lane is of no use any more."""

    def resume(self) -> None:
        """Take `abandon` back: all transfers have ended after all."""
        return

    @abstractmethod
    def close(self) -> None:
        """Leave the lane; nothing is under way."""


# Makes a lane from a store of its own, this node, their number, and a limit in seconds. Collective
# over the lane.
MakeCarrier: TypeAlias = Callable[[Store, int, int, float], Carrier]
