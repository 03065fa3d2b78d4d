# SPDX-License-Identifier: Apache-2.0
"""Sends and receives: what a user asks for, and whether it makes sense on this rank.

Decides the checks of arguments. Must not know how or where a transfer is carried out.
"""

import operator
from dataclasses import dataclass

from fastcoll.errors import UsageError
from fastcoll.memory.array import Array, ArrayView, check_output, view
from fastcoll.reliability.limits import call_limit_s

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


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send or a receive with its arguments checked; a peer of ANY is any rank."""

    sends: bool
    array: ArrayView
    peer: int
    tag: int
    limit_s: float


def check_transfer(call: TransferCall, world_size: int) -> Transfer:
    """Check the arguments of a send or a receive.

    Raises:
        UsageError: They do not fit together.
        UnsupportedError: Their memory or dtype can't be had.
    """
    peer = _checked_peer(call.peer, "dst" if call.sends else "src", world_size, call.sends)
    array = view(call.tensor, "tensor", gpu=True)
    if not call.sends:
        check_output(array, "tensor")
    return Transfer(call.sends, array, peer, _checked_tag(call.tag), call_limit_s(call.timeout_s))


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
