# SPDX-License-Identifier: Apache-2.0
"""The bytes of a message between two ranks, as the CPU's memory has them: piece by piece.

Decides how large pieces are, and how a tensor on a GPU gets through the host. Its pieces take turns
in two pieces of pinned memory, which a stream of fastcoll's own copies to or from. The sender cuts.
A tensor on a CPU is one piece, unless it is huge, and a copy of the whole if the receiver is on a
GPU. Must not know the peer, nor the carrier.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Protocol, TypeAlias

import torch

from fastcoll.calls.arrays import copy_back, dense_copy, view
from fastcoll.calls.foreign import on_producers_stream
from fastcoll.calls.transfers import Transfer
from fastcoll.errors import DriverError, FastcollError, UnsupportedError
from fastcoll.machine import gpu
from fastcoll.nodes.arrays import tensor_at
from fastcoll.nodes.gpus import captures
from fastcoll.types import TORCH_DTYPES, DType

# Of a GPU's. Not measured: large against the start of a copy and of a transfer, small against the
# memory of a host.
PIECE_BYTES = 8 << 20
_MOST_BYTES = 1 << 30  # of a piece of the CPU's memory: MPI counts bytes by its `int`
_NUM_SLOTS = 2  # one is copied while the other one travels

# Waits until its argument returns True; raises the error that ends the wait.
WaitFor: TypeAlias = Callable[[Callable[[], bool]], None]


class Payload(Protocol):
    """A message's bytes."""

    piece_bytes: int  # of each piece but the last one, which has the rest
    num_pieces: int  # none for an empty message
    # How many pieces have memory of their own at a time: piece k takes the place of the one that is
    # so many before it.
    num_slots: int

    def cut_as(self, piece_bytes: int) -> "Payload":
        """Return the payload that receives a message with these pieces."""

    def here(self) -> AbstractContextManager[object]:
        """Let this thread use the methods below."""

    def piece(self, index: int) -> torch.Tensor:
        """Return a piece's memory on the CPU (uint8)."""

    def move(self, index: int, wait: WaitFor) -> None:
        """Bring a piece from the tensor to its memory, for a receive the other way round."""

    def finish(self, wait: WaitFor) -> None:
        """Copy the received bytes to the user's tensor."""


def _num_pieces(num_bytes: int, piece_bytes: int) -> int:
    return -(-num_bytes // piece_bytes)


class HostPayload:
    """A tensor or an array in the CPU's memory: nothing has to be moved."""

    def __init__(self, transfer: Transfer) -> None:
        array = transfer.array
        self._transfer = transfer
        self._dense = array if array.dense else dense_copy(array, fill=transfer.sends)
        self.bytes = tensor_at(self._dense.ptr, DType.uint8, self._dense.num_bytes)
        self._cut(min(max(1, array.num_bytes), _MOST_BYTES))

    def _cut(self, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self.num_pieces = _num_pieces(self.bytes.numel(), piece_bytes)
        self.num_slots = self.num_pieces + 1

    def cut_as(self, piece_bytes: int) -> "HostPayload":
        self._cut(piece_bytes)
        return self

    def here(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def piece(self, index: int) -> torch.Tensor:
        return self.bytes[index * self.piece_bytes :][: self.piece_bytes]

    def move(self, index: int, wait: WaitFor) -> None:
        """See `Payload`."""

    def finish(self, wait: WaitFor) -> None:
        if not self._transfer.sends and self._dense is not self._transfer.array:
            copy_back(self._transfer.array, self._dense)


class GpuPayload:
    """A tensor on a GPU, as the stream that is current when this is made leaves it or gets it.

    All but the making is for a thread of fastcoll's own, inside of `here`.
    """

    def __init__(self, transfer: Transfer) -> None:
        """Take the tensor, without waiting for its stream.

        Raises:
            UnsupportedError: The stream is being captured, or no GPU can be used.
        """
        array = transfer.array
        self.device = array.device
        self.transfer = transfer
        with on_producers_stream([array], self.device):
            if captures.is_capturing():
                raise UnsupportedError(
                    "sends and receives in a group over several nodes go through the host, so they "
                    "can't be captured: make them before or after the graph, or, between ranks of "
                    "one node, in a group of these alone (new_group())"
                )
            self._dense = array if array.dense else dense_copy(array, fill=transfer.sends)
            # Earlier work of the stream writes the sent tensor, or reads the one to overwrite.
            self._before = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._before.record(torch.cuda.current_stream(self.device))
        self._stream = _stream(self.device, transfer.sends)
        self.piece_bytes = PIECE_BYTES
        self.num_pieces = _num_pieces(array.num_bytes, PIECE_BYTES)
        self.num_slots = _NUM_SLOTS
        self._slots: list[torch.Tensor] = []

    def cut_as(self, piece_bytes: int) -> Payload:
        return self if self.num_pieces <= 1 or piece_bytes == PIECE_BYTES else _Whole(self)

    def move_all(self, copy: HostPayload, wait: WaitFor) -> None:
        """Bring all from the tensor to a copy on the CPU, for a receive the other way round."""
        sends = self.transfer.sends
        for index in range(self.num_pieces):
            part = copy.bytes[index * PIECE_BYTES :][:PIECE_BYTES]
            if not sends:
                self.piece(index).copy_(part)
            self.move(index, wait)
            if sends:
                part.copy_(self.piece(index))
        self.finish(wait)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Let this thread work on the GPU, also while others capture.

        Raises:
            DriverError: The GPU, or torch, refused something.
        """
        try:
            with torch.cuda.device(self.device):
                captures.ignore_captures(self.device)
                yield
        except FastcollError:
            raise
        except RuntimeError as error:
            raise DriverError(f"cuda:{self.device} failed in a transfer: {error}") from error

    def piece(self, index: int) -> torch.Tensor:
        num_bytes = min(PIECE_BYTES, self._dense.num_bytes - index * PIECE_BYTES)
        if index < _NUM_SLOTS and index == len(self._slots):
            self._slots.append(_pinned(num_bytes))
        return self._slots[index % _NUM_SLOTS][:num_bytes]

    def move(self, index: int, wait: WaitFor) -> None:
        # By the host, not by the copies' stream: that would hold up copies of other transfers.
        self._await_stream(wait)
        host = self.piece(index)
        address = self._dense.ptr + index * PIECE_BYTES
        there = tensor_at(address, DType.uint8, host.numel(), self.device)
        ends = (host, there) if self.transfer.sends else (there, host)
        self._do(lambda: _copy(*ends), wait)

    def finish(self, wait: WaitFor) -> None:
        if not self.transfer.sends and self._dense is not self.transfer.array:
            self._await_stream(wait)
            self._do(lambda: copy_back(self.transfer.array, self._dense), wait)

    def _await_stream(self, wait: WaitFor) -> None:
        wait(self._before.query)

    def _do(self, task: Callable[[], None], wait: WaitFor) -> None:
        """Do something in the stream of copies, and wait for it."""
        with torch.cuda.stream(self._stream):
            task()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        wait(done.query)


def copy_on_host(transfer: Transfer) -> Transfer:
    """Return the same transfer of memory on the CPU, which has yet to be filled."""
    shape, dtype = transfer.array.shape, TORCH_DTYPES[transfer.array.dtype]
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    return replace(transfer, array=view(tensor, "copy"))


class _Whole(HostPayload):
    """Receives a message for a GPU that comes in the pieces of a CPU's."""

    def __init__(self, target: GpuPayload) -> None:
        super().__init__(copy_on_host(target.transfer))
        self._target = target

    def here(self) -> AbstractContextManager[object]:
        return self._target.here()

    def finish(self, wait: WaitFor) -> None:
        self._target.move_all(self, wait)


@cache
def _stream(device: int, sends: bool) -> torch.cuda.Stream:
    """Return where all transfers of one direction copy; nothing waits in it.

    Raises:
        UnsupportedError: No GPU can be used.
    """
    gpu.require()
    del sends  # each direction has a copy engine
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _pinned(num_bytes: int) -> torch.Tensor:
    """Return memory that copy engines reach; torch keeps it for the next request."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
