# SPDX-License-Identifier: Apache-2.0
"""The functions of the module that move a tensor between two ranks.

Decides which group and which of its ranks a call means; the rest is in the group's methods.
"""

import torch.distributed as dist

from fastcoll.api.declared import verb
from fastcoll.api.groups import GroupLike, member_of, named_rank, rank_in, source_in
from fastcoll.calls.arrays import Array
from fastcoll.calls.batches import P2POp, kind_of
from fastcoll.calls.transfer_work import AnyTransferWork, NoTransfer
from fastcoll.calls.transfers import TransferCall
from fastcoll.errors import UsageError


@verb
def send(
    tensor: Array,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    *,
    timeout_s: float | None = None,
    group_dst: int | None = None,
) -> None:
    """Send a tensor to another rank; return once it may be changed again.

    To itself a rank sends by `isend` or `batch_isend_irecv`, at every size; `send` would wait for
    a receive that comes after it.

    A message of up to 224 bytes is sent without waiting for the receiver, unless 32 messages from
    this rank wait there already. On a GPU the current stream waits. There the messages of a pair
    match in order, and their tags must be equal; NCCL compares neither tags nor sizes. Sends and
    receives on GPUs that wait for each other belong in one `batch_isend_irecv`.

    In a group over several nodes a tensor on a GPU goes through the host, also within a node. Tags,
    order and errors are then as on CPUs, and the program waits, not the stream. The tensor is sent
    as the current stream leaves it. It is overwritten once the work that the stream has now is
    done. Both count for the limit. Either side may be on a CPU. Such a call can't be captured.

    Args:
        tensor: Tensor, NumPy array, or an array of CuPy's kind.
        dst: Rank in the group; the global rank if `group` is a torch process group.
        group: A Group or a torch process group; None is the default group.
        tag: Tells messages apart: a receive gets the oldest one with its tag.
        timeout_s: Limit of this call; None takes the group's.
        group_dst: In place of `dst`: a rank in the group, also for a torch process group.

    Raises:
        UsageError: The arguments do not fit together; nothing was sent.
        DesyncError: The receiver expects another dtype or number of elements.
        CollectiveTimeout: The receiver did not come within the limit; the text shows a cycle of
            ranks that wait for each other, if there is one.
        PeerLostError: The receiver died.
    """
    comm = member_of(group, "send", timeout_s=timeout_s)
    if comm is not None:
        peer = rank_in(group, dst, "dst", group_dst)
        comm.transfer(
            TransferCall(sends=True, tensor=tensor, peer=peer, tag=tag, timeout_s=timeout_s)
        )


@verb
def recv(
    tensor: Array,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    *,
    timeout_s: float | None = None,
    group_src: int | None = None,
) -> int:
    """Receive a tensor from another rank.

    Args:
        tensor: Where it goes, of the dtype and number of elements that are sent.
        src: Rank in the group; the global rank if `group` is a torch process group. None is the
            first sender; a tensor on a GPU needs a rank.
        group: See `send`, as for the other arguments and the errors.
        tag: See `send`.
        timeout_s: Limit of this call.
        group_src: In place of `src`: a rank in the group, also for a torch process group.

    Returns:
        The rank that sent it; -1 if this rank is not in the group.
    """
    comm = member_of(group, "recv", timeout_s=timeout_s)
    if comm is None:
        return -1
    peer = source_in(group, src, group_src)
    source = comm.transfer(
        TransferCall(sends=False, tensor=tensor, peer=peer, tag=tag, timeout_s=timeout_s)
    )
    return named_rank(group, source)


@verb
def isend(
    tensor: Array,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    *,
    timeout_s: float | None = None,
    group_dst: int | None = None,
) -> AnyTransferWork:
    """Start to send a tensor; it must not be changed before the Work is complete. See `send`.

    On a rank that is not in the group the Work is complete. A process that ends gives the receivers
    of its open sends 5 seconds.
    """
    comm = member_of(group, "isend", timeout_s=timeout_s)
    if comm is None:
        return NoTransfer()
    peer = rank_in(group, dst, "dst", group_dst)
    call = TransferCall(sends=True, tensor=tensor, peer=peer, tag=tag, timeout_s=timeout_s)
    return comm.start_transfers([call])[0]


@verb
def irecv(
    tensor: Array,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    *,
    timeout_s: float | None = None,
    group_src: int | None = None,
) -> AnyTransferWork:
    """Start to receive a tensor; it is there once the Work is complete. See `recv`.

    On a rank that is not in the group the Work is complete, and its `source_rank()` is -1. A
    process that ends waits for no receive.
    """
    comm = member_of(group, "irecv", timeout_s=timeout_s)
    if comm is None:
        return NoTransfer()
    peer = source_in(group, src, group_src)
    call = TransferCall(sends=False, tensor=tensor, peer=peer, tag=tag, timeout_s=timeout_s)
    return comm.start_transfers([call])[0]


@verb
def batch_isend_irecv(
    p2p_op_list: list[P2POp] | list[dist.P2POp], group: GroupLike = None
) -> list[AnyTransferWork]:
    """Start several sends and receives, in any order; return a Work for each.

    Args:
        p2p_op_list: The transfers to start, each a `fastcoll.P2POp` or torch.distributed's.
        group: The group whose ranks the peers are, if they name none themselves. See `send`.
    """
    if not isinstance(p2p_op_list, list | tuple):
        raise UsageError(f"p2p_op_list must be a list, not {type(p2p_op_list).__name__}")
    for op in p2p_op_list:
        if not isinstance(op, P2POp | dist.P2POp):
            raise UsageError(f"p2p_op_list must hold fastcoll.P2POp, not {op!r}")
        if op.group is not None:
            if group is not None and op.group != group:
                raise UsageError("the transfers of a batch must be of one group")
            group = op.group
    comm = member_of(group, "batch_isend_irecv")
    if comm is None:
        return []
    return comm.start_transfers([_transfer_of(op, group) for op in p2p_op_list])


def _transfer_of(op: P2POp | dist.P2POp, group: GroupLike) -> TransferCall:
    # torch's op has the peer by both of its names.
    in_group = op.group_peer if isinstance(op, P2POp) else None
    peer = source_in(group, op.peer, in_group)
    return TransferCall(sends=kind_of(op.op) == "isend", tensor=op.tensor, peer=peer, tag=op.tag)
