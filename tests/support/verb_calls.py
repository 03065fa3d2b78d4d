# SPDX-License-Identifier: Apache-2.0
"""Every verb with one tensor that it reads and one that it writes.

Decides the sizes and the roots. A test decides the group, and its use of the two tensors. The
group is a Communicator's or torch's (TorchGroup in backends.py), whose verbs have the same names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fastcoll

NUMEL = 64
KNOWN = 3  # calls of a kind after which C++ makes the next one
Who = Callable[[int], bool]  # whether a rank is one of them


def everybody(rank: int) -> bool:
    del rank
    return True


def nobody(rank: int) -> bool:
    del rank
    return False


def root(rank: int) -> bool:
    return rank == 0


def others(rank: int) -> bool:
    return rank != 0


def second(rank: int) -> bool:
    return rank == 1


@dataclass(frozen=True)
class VerbCall:
    """A call in a group, a tensor that it reads and one that it writes.

    Attributes:
        make: Makes the call, with options by name; returns a Work or None.
        wholes: Which of the two have a part for each rank: "i" the input, "o" the output.
        reads: The ranks that read the input.
        writes: The ranks that write the output.
        strided: The tensors are every second element of others.
        is_async: The call takes `async_op`.
        in_torch: torch.distributed has a function for it.
    """

    make: Callable[..., Any]
    wholes: str = ""
    reads: Who = everybody
    writes: Who = everybody
    strided: bool = False
    is_async: bool = True
    in_torch: bool = True

    def tensors(
        self, world: int, dtype: torch.dtype = torch.float32, numel: int = NUMEL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an input and an output, in which other numbers lie."""
        given, got = (numel * (world if side in self.wholes else 1) for side in "io")
        return self.laid(torch.arange(given).to(dtype)), self.laid(torch.ones(got, dtype=dtype))

    def laid(self, values: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of these values, in the layout of this call."""
        if not self.strided:
            return values.clone()
        return torch.zeros(2 * values.numel(), dtype=values.dtype)[::2].copy_(values)

    def make_known(self, comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
        """Make the call so often that C++ makes the next one."""
        for _ in range(KNOWN):
            self.make(comm, given, got)


def _list_for(comm: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a list of one tensor for each rank; `tensor` is rank 0's."""
    return [tensor, *(torch.zeros_like(tensor.detach()) for _ in range(comm.world_size - 1))]


def _at_root(comm: Any, value: Any) -> Any:
    return value if comm.rank == 0 else None


def _to_next(comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    """Send with isend and receive with irecv, around the ranks."""
    me, world = comm.rank, comm.world_size
    works = [comm.irecv(got, (me - 1) % world, tag=3), comm.isend(given, (me + 1) % world, tag=3)]
    for work in works:
        work.wait()


def _in_a_batch(comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    me, world = comm.rank, comm.world_size
    ops = [
        fastcoll.P2POp("irecv", got, (me - 1) % world),
        fastcoll.P2POp("isend", given, (me + 1) % world),
    ]
    for work in comm.batch_isend_irecv(ops):
        work.wait()


def _send(comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    if comm.world_size == 1:
        return
    if comm.rank == 0:
        comm.send(given, 1, tag=4)
    elif comm.rank == 1:
        comm.recv(got, 0, tag=4)


def _coalesced(comm: Any, given: torch.Tensor, got: torch.Tensor, **how: Any) -> Any:
    return comm.all_reduce_coalesced([got, torch.zeros_like(given.detach())], **how)


def _waited(comm: Any, given: torch.Tensor, got: torch.Tensor) -> None:
    del given
    comm.all_reduce(got, async_op=True).wait()


def _all_reduce(comm: Any, given: torch.Tensor, got: torch.Tensor, **how: Any) -> Any:
    del given
    return comm.all_reduce(got, **how)


VERB_CALLS: dict[str, VerbCall] = {
    "all_reduce": VerbCall(_all_reduce, reads=nobody),
    "all_reduce, waited": VerbCall(_waited, reads=nobody, is_async=False),
    "all_reduce, strided": VerbCall(_all_reduce, reads=nobody, strided=True),
    "all_reduce, out": VerbCall(lambda c, i, o, **h: c.all_reduce(i, out=o, **h), in_torch=False),
    "all_reduce_coalesced": VerbCall(_coalesced, reads=nobody),
    "reduce": VerbCall(lambda c, _, o, **h: c.reduce(o, 0, **h), reads=nobody, writes=root),
    "reduce, out": VerbCall(
        lambda c, i, o, **h: c.reduce(i, 0, out=_at_root(c, o), **h), writes=root, in_torch=False
    ),
    "broadcast": VerbCall(
        lambda c, i, o, **h: c.broadcast(o if c.rank else i, 0, **h), reads=root, writes=others
    ),
    "reduce_scatter_tensor": VerbCall(lambda c, i, o, **h: c.reduce_scatter_tensor(o, i, **h), "i"),
    "reduce_scatter": VerbCall(lambda c, i, o, **h: c.reduce_scatter(o, _list_for(c, i), **h)),
    "reduce_scatter_tensor_coalesced": VerbCall(
        lambda c, i, o, **h: c.reduce_scatter_tensor_coalesced([o], [i], **h), "i"
    ),
    "all_gather_into_tensor": VerbCall(
        lambda c, i, o, **h: c.all_gather_into_tensor(o, i, **h), "o"
    ),
    "all_gather_into_tensor_coalesced": VerbCall(
        lambda c, i, o, **h: c.all_gather_into_tensor_coalesced([o], [i], **h), "o"
    ),
    "all_gather": VerbCall(lambda c, i, o, **h: c.all_gather(_list_for(c, o), i, **h)),
    "gather": VerbCall(
        lambda c, i, o, **h: c.gather(i, _at_root(c, _list_for(c, o)), 0, **h), writes=root
    ),
    "gather_single": VerbCall(
        lambda c, i, o, **h: c.gather_single(i, _at_root(c, o), 0, **h),
        "o",
        writes=root,
        in_torch=False,  # before 2.14
    ),
    "scatter": VerbCall(
        lambda c, i, o, **h: c.scatter(o, _at_root(c, _list_for(c, i)), 0, **h), reads=root
    ),
    "all_to_all_single": VerbCall(lambda c, i, o, **h: c.all_to_all_single(o, i, **h), "io"),
    "all_to_all": VerbCall(
        lambda c, i, o, **h: c.all_to_all(_list_for(c, o), _list_for(c, i), **h)
    ),
    "barrier": VerbCall(lambda c, _i, _o, **h: c.barrier(**h), reads=nobody, writes=nobody),
    "isend, irecv": VerbCall(_to_next, is_async=False),
    "batch_isend_irecv": VerbCall(_in_a_batch, is_async=False),
    "send, recv": VerbCall(_send, reads=root, writes=second, is_async=False),
}


# Torch 2.11's Gloo takes no lists here.
NOT_OF_GLOO = {"all_to_all"} if torch.__version__ < "2.12" else set()


def verbs_of(name: str) -> set[str]:
    """Return the verbs that an entry of VERB_CALLS calls."""
    return set(name.split(", ")) - {"waited", "strided", "out"}
