# SPDX-License-Identifier: Apache-2.0
"""The verbs that move data without arithmetic, and barrier; C functions, as in reductions.py.

Decides the root that a call means. Must not know how a call is carried out.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch

from fastcoll.api.declared import verb
from fastcoll.api.groups import GroupLike, issue, member_of, nothing, rank_in
from fastcoll.calls.arrays import Array
from fastcoll.calls.limits import one_limit
from fastcoll.calls.parts import PartsCall
from fastcoll.calls.tensors import Call
from fastcoll.calls.work import Work
from fastcoll.types import Verb


@verb
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
    group_src: int | None = None,
) -> Work | None:
    """Copy one rank's tensor to all others. Collective.

    Args:
        tensor: The input on rank `src`, the output on the others.
        src: Rank in the group; the global rank if `group` is a torch process group.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
        group_src: In place of `src`: a rank in the group, also for a torch process group.
    """
    call = Call(
        verb=Verb.broadcast,
        input=tensor,
        output=tensor,
        root=rank_in(group, src, "src", group_src),
        async_op=async_op,
        timeout_s=timeout_s,
    )
    return issue(group, call)


@verb
def all_gather(
    tensor_list: Sequence[Array],
    tensor: Array,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
) -> Work | None:
    """Gather the tensors of all ranks into a list, on every rank. Collective.

    Args:
        tensor_list: Where the tensor of each rank goes. Their sizes may differ from each other,
            and must be the same on all ranks.
        tensor: This rank's input, of as many elements as `tensor_list[rank]`.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
    """
    call = PartsCall(
        verb=Verb.all_gather,
        input=tensor,
        output=tensor_list,
        async_op=async_op,
        timeout_s=timeout_s,
    )
    return issue(group, call)


@verb
def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
) -> Work | None:
    """Put the tensors of all ranks one after another, in rank order, on every rank. Collective.

    Args:
        output_tensor: Where the result goes: `world_size` times the elements of the input.
        input_tensor: This rank's input, of the same number of elements and dtype on all ranks.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
    """
    call = Call(
        verb=Verb.all_gather,
        input=input_tensor,
        output=output_tensor,
        async_op=async_op,
        timeout_s=timeout_s,
    )
    return issue(group, call)


@verb
def gather(
    tensor: Array,
    gather_list: Sequence[Array] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
    group_dst: int | None = None,
) -> Work | None:
    """Gather the tensors of all ranks into a list on rank `dst`. Collective.

    Args:
        tensor: This rank's input, of the same number of elements and dtype on all ranks.
        gather_list: On rank `dst`, where the tensor of each rank goes; None on the others.
        dst: Rank in the group; the global rank if `group` is a torch process group; 0 if neither
            this nor `group_dst` is given.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
        group_dst: In place of `dst`: a rank in the group, also for a torch process group.
    """
    call = PartsCall(
        verb=Verb.gather,
        input=tensor,
        output=gather_list,
        root=rank_in(group, dst, "dst", group_dst, default=0),
        async_op=async_op,
        timeout_s=timeout_s,
    )
    return issue(group, call)


@verb
def gather_single(
    tensor: Array,
    gather_tensor: Array | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
    group_dst: int | None = None,
) -> Work | None:
    """Gather the tensors of all ranks into one on rank `dst`. Collective.

    Args:
        tensor: This rank's input, of the same number of elements and dtype on all ranks.
        gather_tensor: On rank `dst`, where the tensors of rank 0, 1, ... go, one after another: of
            any shape with that many elements. Ignored on the others.
        dst: Rank in the group; the global rank if `group` is a torch process group; 0 if neither
            this nor `group_dst` is given.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
        group_dst: In place of `dst`: a rank in the group, also for a torch process group.
    """
    call = PartsCall(
        verb=Verb.gather,
        input=tensor,
        output=gather_tensor,
        root=rank_in(group, dst, "dst", group_dst, default=0),
        single=True,
        async_op=async_op,
        timeout_s=timeout_s,
    )
    return issue(group, call)


@verb
def scatter(
    tensor: Array,
    scatter_list: Sequence[Array] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
    group_src: int | None = None,
) -> Work | None:
    """Give every rank its tensor of a list on rank `src`. Collective.

    Args:
        tensor: Where this rank's tensor goes, of the same number of elements and dtype everywhere.
        scatter_list: On rank `src`, the tensor for each rank; None on the others.
        src: Rank in the group; the global rank if `group` is a torch process group; 0 if neither
            this nor `group_src` is given.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
        group_src: In place of `src`: a rank in the group, also for a torch process group.
    """
    call = PartsCall(
        verb=Verb.scatter,
        input=scatter_list,
        output=tensor,
        root=rank_in(group, src, "src", group_src, default=0),
        async_op=async_op,
        timeout_s=timeout_s,
    )
    return issue(group, call)


@verb
def all_to_all_single(
    output: Array | None,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
) -> Work | tuple[torch.Tensor, list[int]] | None:
    """Give every rank its rows of a tensor, get this rank's rows of theirs. Collective.

    Args:
        output: Where the rows of rank 0, 1, ... go, one after another. None makes one: then every
            rank gives `input_split_sizes` and no output, and gets the output with its split sizes.
        input: This rank's input: rows for rank 0, 1, ..., one after another.
        output_split_sizes: Rows that come from each rank; None: equally many from each.
        input_split_sizes: Rows that go to each rank; None: equally many to each. Split sizes of
            either kind are given on every rank or on none.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.

    Returns:
        A Work if `async_op`; the output and its split sizes if `output` is None; else None. On a
        rank that is not in the group an output that is made is empty.

    Raises:
        UsageError: Split sizes don't add up to the rows; nothing was sent.
        DesyncError: A rank expects more or fewer elements than another one gives it.
    """
    comm = member_of(group, "all_to_all_single", timeout_s=timeout_s)
    if comm is None:
        return nothing(async_op) if output is not None else (torch.empty(0, device="cpu"), [])
    result = None
    if output is None:
        result = comm.output_for(input, input_split_sizes, output_split_sizes, async_op, timeout_s)
        output, output_split_sizes = result
    work = comm.issue(
        PartsCall(
            verb=Verb.all_to_all,
            input=input,
            output=output,
            input_splits=input_split_sizes,
            output_splits=output_split_sizes,
            async_op=async_op,
            timeout_s=timeout_s,
        )
    )
    return result or work


@verb
def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[Array],
    group: GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
) -> Work | None:
    """Give every rank its tensor of a list, get this rank's tensor of theirs. Collective.

    Args:
        output_tensor_list: Where the tensor of each rank goes; of any sizes.
        input_tensor_list: The tensor for each rank, of any sizes.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.

    Raises:
        DesyncError: A rank expects more or fewer elements than another one gives it.
    """
    call = PartsCall(
        verb=Verb.all_to_all,
        input=input_tensor_list,
        output=output_tensor_list,
        async_op=async_op,
        timeout_s=timeout_s,
    )
    return issue(group, call)


@verb
def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    *,
    timeout_s: float | None = None,
) -> Work | None:
    """Wait until every rank has come here. Collective.

    Args:
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        device_ids: Changes nothing: no device takes part. torch.distributed has it for NCCL.
        timeout: Limit of this call, as torch.distributed takes it.
        timeout_s: The same in seconds.
    """
    del device_ids
    limit = one_limit(timeout, timeout_s)
    return issue(group, Call(verb=Verb.barrier, async_op=async_op, timeout_s=limit))


# As torch.distributed calls them from 2.13 on.
all_gather_single = all_gather_into_tensor
gather_into_tensor = gather_single
