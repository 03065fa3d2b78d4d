# SPDX-License-Identifier: Apache-2.0
"""The last message of a rank that can't go on: the reason, so that its peers name the same ranks.

A rank that dies says nothing; its peers see a hang-up and name it. A rank that gives up because
of another one would look the same, so it sends its reason down every socket before it closes it.
Decides the form of that message, which csrc/cpu/wait.cpp reads too. Must not know the failed step.
"""

import os
import struct
from collections.abc import Iterable

from fastcoll.bootstrap.os_errors import REFUSALS, explain
from fastcoll.errors import (
    CollectiveTimeout,
    DesyncError,
    DriverError,
    FastcollError,
    PeerLostError,
)
from fastcoll.native import _C

MOST_BYTES = 2048
_HEAD = struct.Struct("=QQQ")  # K_FAREWELL, one of KINDS, the ranks at fault as bits
# ErrorKind of csrc/check.h
KINDS: dict[type[BaseException], int] = {
    CollectiveTimeout: 3,
    DesyncError: 4,
    PeerLostError: 5,
    DriverError: 6,
}
_REFUSED = "the operating system refused rank"


def say_farewell(fds: Iterable[int], rank: int, error: BaseException) -> None:
    """Send the reason down some non-blocking sockets; a peer that is gone does not get it."""
    message = farewell_of(rank, error)
    for fd in fds:
        try:
            os.write(fd, message)
        except OSError:
            continue


def farewell_of(rank: int, error: BaseException) -> bytes:
    """Return the message that tells why a rank gives up."""
    if isinstance(error, (*REFUSALS, DriverError)):
        reason = explain(error) if isinstance(error, REFUSALS) else str(error)
        is_told = reason.startswith(_REFUSED)  # by another rank
        error = DriverError(reason if is_told else f"{_REFUSED} {rank} what it needs: {reason}")
    elif type(error) not in KINDS:
        error = PeerLostError(f"rank {rank} gave up: {type(error).__name__}: {error}", [rank])
    kind = KINDS[type(error)]
    bits = sum(1 << peer for peer in getattr(error, "ranks", ()))
    head = _HEAD.pack(_C.K_FAREWELL, kind, bits)
    return head + str(error).encode()[: MOST_BYTES - len(head)]


def farewell_in(message: bytes) -> FastcollError | None:
    """Return the reason that a message holds, or None if it is something else."""
    if len(message) < _HEAD.size:
        return None
    tag, kind, bits = _HEAD.unpack_from(message)
    if tag != _C.K_FAREWELL:
        return None
    text = message[_HEAD.size :].decode(errors="replace")
    ranks = [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
    for plain in (DesyncError, DriverError):
        if kind == KINDS[plain]:
            return plain(text)
    return (CollectiveTimeout if kind == KINDS[CollectiveTimeout] else PeerLostError)(text, ranks)


def why_gone(fd: int, peer: int) -> FastcollError:
    """Return the reason a peer left behind in its socket; one that left none is lost itself."""
    while True:
        try:
            message = os.read(fd, MOST_BYTES)
        except ConnectionResetError:  # raised once, before the messages in the queue
            continue
        except OSError:
            message = b""
        if not message:
            return PeerLostError(f"rank {peer} hung up", [peer])
        if error := farewell_in(message):
            return error
