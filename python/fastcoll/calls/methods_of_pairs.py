# SPDX-License-Identifier: Apache-2.0
"""send, recv and their fellows as methods of a group.

Each is the C function of the same name, for this group. Decides what a batch consists of. Must not
know how transfers are carried out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastcoll.calls.arrays import Array
from fastcoll.calls.transfer_work import AnyTransferWork, Transfers
from fastcoll.calls.transfers import TransferCall
from fastcoll.errors import UsageError
from fastcoll.native import _C


@dataclass(slots=True, eq=False)  # a frozen one takes longer to make than to carry out
class P2POp:
    """One transfer of a batch; see `batch_isend_irecv`.

    Attributes:
        op: "isend" or "irecv", or the function of that name.
        tensor: What is sent, or where what comes is put.
        peer: Rank in the group; the global rank if that is a torch process group; for irecv None is
            any rank.
        group: A Communicator or a torch process group, the same in all of a batch; None leaves it
            to the batch.
        tag: Tells messages of one pair apart.
        group_peer: In place of `peer`: a rank of the group, whatever kind that is.
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


class P2PMethods:
    """Sends and receives. Messages of one pair and tag arrive in the order they were sent."""

    _transfers: Transfers

    def send(
        self, tensor: Array, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> None:
        """See `fastcoll.send`; `dst` is a rank of this group."""
        _C.send(tensor, dst, self, tag, timeout_s=timeout_s)

    def recv(
        self,
        tensor: Array,
        src: int | None = None,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """See `fastcoll.recv`; `src` and the result are ranks of this group."""
        return _C.recv(tensor, src, self, tag, timeout_s=timeout_s)

    def transfer(self, call: TransferCall) -> int:
        """Carry out one that is not on the C++ fast path; return the peer."""
        return self._transfers.run(call)

    def start_transfers(self, calls: Sequence[TransferCall]) -> list[AnyTransferWork]:
        """Start some that are not on the C++ fast path."""
        return self._transfers.start(calls)

    def drive_transfers(self) -> None:
        """Move the open transfers on, in whichever thread; called from C++."""
        self._transfers.drive()

    def isend(
        self, tensor: Array, dst: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> AnyTransferWork:
        """See `fastcoll.isend`; `dst` is a rank of this group."""
        return _C.isend(tensor, dst, self, tag, timeout_s=timeout_s)

    def irecv(
        self,
        tensor: Array,
        src: int | None = None,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> AnyTransferWork:
        """See `fastcoll.irecv`; `src` is a rank of this group."""
        return _C.irecv(tensor, src, self, tag, timeout_s=timeout_s)

    def batch_isend_irecv(self, p2p_op_list: list[P2POp]) -> list[AnyTransferWork]:
        """See `fastcoll.batch_isend_irecv`; peers are ranks of this group."""
        return _C.batch_isend_irecv(p2p_op_list, self)


_C.set_p2p_op_type(P2POp)
