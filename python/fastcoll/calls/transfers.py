# SPDX-License-Identifier: Apache-2.0
"""Sends and receives, and their checks on this rank.

Decides the checks of arguments. Must not know how or where a transfer is carried out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from fastcoll.calls.arrays import Array, ArrayView, check_output, view
from fastcoll.calls.limits import call_limit_s
from fastcoll.calls.tensors import checked_integer, checked_rank
from fastcoll.errors import UsageError

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
    # Ranks outside of the group may answer a receive from ANY, too: it goes on when all peers in
    # the group are gone.
    has_other_senders: bool = False

    def written(self) -> list[ArrayView]:
        """Return the arrays that the transfer writes on this rank."""
        return [] if self.sends else [self.array]


def check_transfer(call: TransferCall, world_size: int) -> Transfer:
    """Check the arguments of a send or a receive.

    Raises:
        UsageError: They do not fit together.
        UnsupportedError: Their memory or dtype can't be had.
    """
    if call.peer is None and not call.sends:
        peer = ANY
    else:
        peer = checked_rank(call.peer, "dst" if call.sends else "src", world_size)
    array = view(call.tensor, "tensor", gpu=True)
    if not call.sends:
        check_output(array, "tensor")
    return Transfer(call.sends, array, peer, _checked_tag(call.tag), call_limit_s(call.timeout_s))


def refuse_wait_for_itself(transfer: Transfer, rank: int) -> Transfer:
    """Return a transfer that its program waits for at once; UsageError if it sends to itself.

    A message that fits beside an offer could be sent so, a larger one would wait for ever.
    """
    if transfer.sends and transfer.peer == rank:
        raise UsageError(
            f"send to rank {rank}, which is this rank, would wait for its own recv: use isend, or "
            "batch_isend_irecv"
        )
    return transfer


def to_itself(transfers: Sequence[Transfer]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair a rank's sends to itself with its receives, in their order: source and target.

    Raises:
        UsageError: One has no other side among them, or another one than it expects.
    """
    sends = [one for one in transfers if one.sends]
    receives = [one for one in transfers if not one.sends]
    if len(sends) != len(receives):
        raise UsageError(
            "on a GPU a send to the rank itself and its receive belong in one batch_isend_irecv; "
            f"here are {len(sends)} and {len(receives)}"
        )
    pairs = []
    for given, taken in zip(sends, receives, strict=True):
        sides = [(one.tag, one.array.kind_of_elements, one.array.numel) for one in (given, taken)]
        if sides[0] != sides[1]:
            raise UsageError(
                f"this rank sends itself (tag, dtype, elements) {sides[0]}, but expects {sides[1]}"
            )
        # Arrays on a GPU are tensors.
        source, target = (cast("torch.Tensor", one.array.source) for one in (given, taken))
        pairs.append((source.detach(), target.detach()))
    return pairs


def _checked_tag(tag: object) -> int:
    number = checked_integer(tag, "tag must be an integer")
    if not 0 <= number < _MOST_TAG:
        raise UsageError(f"tag={number} must be from 0 to 2**32 - 1")
    return number
