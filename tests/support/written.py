# SPDX-License-Identifier: Apache-2.0
"""Every verb with one tensor that it reads and one that it writes.

Decides the sizes and the roots. Each test decides how it uses the two tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NUMEL = 64
KNOWN = 3  # calls of a kind after which C++ makes the next one
NOBODY = -1  # in place of a rank
Call = Callable[[Any, torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True)
class VerbCall:
    """A call on a communicator, a tensor that it reads and one that it writes.

    Attributes:
        wholes: Which of the two have a part for each rank: "i" the input, "o" the output.
        reads: The one rank that reads the input, or NOBODY; None where all do.
        writes: The one rank that writes the output; None where all do.
        strided: The tensors are every second element of others.
    """

    call: Call
    wholes: str = ""
    reads: int | None = None
    writes: int | None = None
    strided: bool = False

    def tensors(self, world: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an input and an output."""
        given, got = (NUMEL * (world if side in self.wholes else 1) for side in "io")
        return self.laid(torch.arange(given).to(dtype)), self.laid(torch.zeros(got, dtype=dtype))

    def laid(self, values: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of these values, in the layout of this call."""
        if not self.strided:
            return values.clone()
        return torch.zeros(2 * values.numel(), dtype=values.dtype)[::2].copy_(values)


def make_known(verb: VerbCall, comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    """Make a call so often that C++ makes the next one."""
    for _ in range(KNOWN):
        verb.call(comm, given, got)


def _list_for(comm: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a list of one tensor for each rank; `tensor` is rank 0's."""
    return [tensor, *(torch.zeros_like(tensor.detach()) for _ in range(comm.world_size - 1))]


def _at_root(comm: Any, root: int, value: Any) -> Any:
    return value if comm.rank == root else None


def _to_next(comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    """Send with isend and receive with irecv, around the ranks."""
    me, world = comm.rank, comm.world_size
    works = [comm.irecv(got, (me - 1) % world, 3), comm.isend(given, (me + 1) % world, 3)]
    for work in works:
        work.wait()


def _in_a_batch(comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    import fastcoll

    me, world = comm.rank, comm.world_size
    ops = [
        fastcoll.P2POp("irecv", got, (me - 1) % world),
        fastcoll.P2POp("isend", given, (me + 1) % world),
    ]
    for work in comm.batch_isend_irecv(ops):
        work.wait()


def _send(comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    if comm.rank == 0:
        comm.send(given, 1, 4)
    elif comm.rank == 1:
        comm.recv(got, 0, 4)


def _broadcast(comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    comm.broadcast(given if comm.rank == 0 else got, 0)


def _coalesced(comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    comm.all_reduce_coalesced([got, torch.zeros_like(given.detach())])


def _waited(comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    comm.all_reduce(given, out=got, async_op=True).wait()


VERBS: dict[str, VerbCall] = {
    "all_reduce": VerbCall(lambda c, i, o: c.all_reduce(i, out=o)),
    "all_reduce, asynchronous": VerbCall(_waited),
    "all_reduce, strided": VerbCall(lambda c, i, o: c.all_reduce(i, out=o), strided=True),
    "all_reduce_coalesced": VerbCall(_coalesced, reads=NOBODY),
    "reduce": VerbCall(
        lambda c, i, o: c.reduce(i, 0, out=_at_root(c, 0, o)),
        writes=0,
    ),
    "broadcast": VerbCall(_broadcast, reads=0, writes=1),
    "reduce_scatter_tensor": VerbCall(lambda c, i, o: c.reduce_scatter_tensor(o, i), "i"),
    "reduce_scatter": VerbCall(lambda c, i, o: c.reduce_scatter(o, _list_for(c, i))),
    "reduce_scatter_tensor_coalesced": VerbCall(
        lambda c, i, o: c.reduce_scatter_tensor_coalesced([o], [i]), "i"
    ),
    "all_gather_into_tensor": VerbCall(lambda c, i, o: c.all_gather_into_tensor(o, i), "o"),
    "all_gather_into_tensor_coalesced": VerbCall(
        lambda c, i, o: c.all_gather_into_tensor_coalesced([o], [i]), "o"
    ),
    "all_gather": VerbCall(lambda c, i, o: c.all_gather(_list_for(c, o), i)),
    "gather": VerbCall(lambda c, i, o: c.gather(i, _at_root(c, 0, _list_for(c, o)), 0), writes=0),
    "gather_single": VerbCall(
        lambda c, i, o: c.gather_single(i, _at_root(c, 0, o), 0), "o", writes=0
    ),
    "scatter": VerbCall(lambda c, i, o: c.scatter(o, _at_root(c, 0, _list_for(c, i)), 0), reads=0),
    "all_to_all_single": VerbCall(lambda c, i, o: c.all_to_all_single(o, i), "io"),
    "all_to_all": VerbCall(lambda c, i, o: c.all_to_all(_list_for(c, o), _list_for(c, i))),
    "isend, irecv": VerbCall(_to_next),
    "batch_isend_irecv": VerbCall(_in_a_batch),
    "send, recv": VerbCall(_send, reads=0, writes=1),
}
