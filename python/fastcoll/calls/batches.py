# SPDX-License-Identifier: Apache-2.0
"""One send or receive of a batch. Must not know how transfers are carried out."""

from dataclasses import dataclass
from typing import Any, Literal

from fastcoll.calls.arrays import Array
from fastcoll.errors import UsageError
from fastcoll.native import _C


@dataclass(slots=True, eq=False)  # a frozen one takes longer to make than to carry out
class P2POp:
    """One transfer of a batch; see `batch_isend_irecv`.

    Attributes:
        op: "isend" or "irecv", or the function of that name.
        tensor: The tensor to send, or the output of a receive.
        peer: Rank in the group; the global rank if that is a torch process group; for irecv None is
            any rank.
        group: A Group or a torch process group, the same in all of a batch; None leaves it
            to the batch.
        tag: Tells messages of one pair apart.
        group_peer: In place of `peer`: a rank in the group, also for a torch process group.
    """

    op: object
    tensor: Array
    peer: int | None = None
    group: Any = None
    tag: int = 0
    group_peer: int | None = None


def kind_of(op: object) -> Literal["isend", "irecv"]:
    """Return whether a transfer of a batch sends or receives."""
    name = getattr(op, "__name__", op)
    if name == "isend":
        return "isend"
    if name == "irecv":
        return "irecv"
    raise UsageError(f"op must be isend or irecv, not {op!r}")


_C.set_p2p_op_type(P2POp)
