# SPDX-License-Identifier: Apache-2.0
"""The functions with a root, or with a part for each rank.

Decides which group and which of its ranks a call means. They are C functions, as in api.py; what
these can't do themselves they pass on to the functions here.
"""

from collections.abc import Sequence

import torch

from fastcoll import _C
from fastcoll.calls import Call
from fastcoll.groups import GroupLike, member_of, rank_in
from fastcoll.memory.array import Array
from fastcoll.parts import PartsCall
from fastcoll.types import ReduceOp, Verb
from fastcoll.work import Work


def _issue(group: GroupLike, call: Call | PartsCall) -> Work | None:
    comm = member_of(group, call.verb.name, timeout_s=call.timeout_s, stacklevel=4)
    return None if comm is None else comm.issue(call)


def _reduce(
    tensor: Array,
    dst: int | None = None,
    op: object = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    out: Array | None = None,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce a tensor over all ranks; rank `dst` gets the result. Collective.

    Args:
        tensor: What this rank gives; overwritten with the result on rank `dst` unless `out` is
            given, left alone on the others.
        dst: Rank in the group; the global rank if `group` is a torch process group.
        op: See `all_reduce`, as for the other arguments, the result and the errors.
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once.
        out: Where the result goes on rank `dst`, of the shape and dtype of `tensor`.
        algorithm: "auto", "one_shot", "two_shot", or "schedule:NAME" with a name that `fastcoll
            schedule` knows.
        numerics: "same_bits" or "fast".
        timeout_s: Limit of this call.
        group_dst: In place of `dst`: a rank of the group, whatever kind that is.
    """
    return _issue(
        group,
        Call(
            verb=Verb.reduce,
            input=tensor,
            output=tensor if out is None else out,
            op=op,
            root=rank_in(group, dst, "dst", group_dst),
            async_op=async_op,
            algorithm=algorithm,
            numerics=numerics,
            timeout_s=timeout_s,
        ),
    )


def _all_gather(
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
        tensor: What this rank gives: as many elements as `tensor_list[rank]`.
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
    """
    return _issue(
        group,
        PartsCall(
            verb=Verb.all_gather,
            input=tensor,
            output=tensor_list,
            async_op=async_op,
            timeout_s=timeout_s,
        ),
    )


def _reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: object = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
) -> Work | None:
    """Reduce lists of tensors over all ranks; rank r gets the r-th result. Collective.

    Args:
        output: Where this rank's result goes.
        input_list: What this rank gives for each rank. Shapes may differ from each other, and
            must be the same on all ranks; then there is a reduce for each rank.
        op: See `all_reduce`, as for the other arguments, the result and the errors.
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once.
        algorithm: "auto", "one_shot", "two_shot", "ring", "chain", or "schedule:NAME" with a name
            that `fastcoll schedule` knows.
        numerics: "same_bits" or "fast".
        timeout_s: Limit of this call.
    """
    comm = member_of(group, "reduce_scatter", timeout_s=timeout_s)
    call = PartsCall(
        verb=Verb.reduce_scatter,
        input=input_list,
        output=output,
        op=op,
        async_op=async_op,
        algorithm=algorithm,
        numerics=numerics,
        timeout_s=timeout_s,
    )
    return None if comm is None else comm.issue_reduce_scatter(call)


def _gather(
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
        tensor: What this rank gives, of the same number of elements and dtype everywhere.
        gather_list: On rank `dst`, where the tensor of each rank goes; None on the others.
        dst: Rank in the group; the global rank if `group` is a torch process group; 0 if neither
            this nor `group_dst` is given.
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
        group_dst: In place of `dst`: a rank of the group, whatever kind that is.
    """
    return _issue(
        group,
        PartsCall(
            verb=Verb.gather,
            input=tensor,
            output=gather_list,
            root=rank_in(group, dst, "dst", group_dst, default=0),
            async_op=async_op,
            timeout_s=timeout_s,
        ),
    )


def _gather_single(
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
        tensor: What this rank gives, of the same number of elements and dtype everywhere.
        gather_tensor: On rank `dst`, where the tensors of rank 0, 1, ... go, one after another: of
            any shape with that many elements. Ignored on the others.
        dst: Rank in the group; the global rank if `group` is a torch process group; 0 if neither
            this nor `group_dst` is given.
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
        group_dst: In place of `dst`: a rank of the group, whatever kind that is.
    """
    return _issue(
        group,
        PartsCall(
            verb=Verb.gather,
            input=tensor,
            output=gather_tensor,
            root=rank_in(group, dst, "dst", group_dst, default=0),
            single=True,
            async_op=async_op,
            timeout_s=timeout_s,
        ),
    )


def _scatter(
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
        scatter_list: On rank `src`, what goes to each rank; None on the others.
        src: Rank in the group; the global rank if `group` is a torch process group; 0 if neither
            this nor `group_src` is given.
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
        group_src: In place of `src`: a rank of the group, whatever kind that is.
    """
    return _issue(
        group,
        PartsCall(
            verb=Verb.scatter,
            input=scatter_list,
            output=tensor,
            root=rank_in(group, src, "src", group_src, default=0),
            async_op=async_op,
            timeout_s=timeout_s,
        ),
    )


def _all_to_all_single(
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
        input: What this rank gives: rows for rank 0, 1, ..., one after another.
        output_split_sizes: Rows that come from each rank; None: equally many from each.
        input_split_sizes: Rows that go to each rank; None: equally many to each. Split sizes of
            either kind are given on every rank or on none.
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.

    Returns:
        A Work if `async_op`; the output and its split sizes if `output` is None; else None.

    Raises:
        UsageError: Split sizes don't add up to the rows; nothing was sent.
        DesyncError: A rank expects more or fewer elements than another one gives it.
    """
    comm = member_of(group, "all_to_all_single", timeout_s=timeout_s)
    if comm is None:
        return None
    result = None
    if output is None:
        result = comm.output_for(input, input_split_sizes, output_split_sizes, async_op)
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


def _all_to_all(
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
        input_tensor_list: What goes to each rank.
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.

    Raises:
        DesyncError: A rank expects more or fewer elements than another one gives it.
    """
    return _issue(
        group,
        PartsCall(
            verb=Verb.all_to_all,
            input=input_tensor_list,
            output=output_tensor_list,
            async_op=async_op,
            timeout_s=timeout_s,
        ),
    )


_C.set_fallback("reduce", _reduce)
_C.set_fallback("all_gather", _all_gather)
_C.set_fallback("reduce_scatter", _reduce_scatter)
_C.set_fallback("gather", _gather)
_C.set_fallback("gather_single", _gather_single)
_C.set_fallback("scatter", _scatter)
_C.set_fallback("all_to_all_single", _all_to_all_single)
_C.set_fallback("all_to_all", _all_to_all)

reduce = _C.reduce
all_gather = _C.all_gather
reduce_scatter = _C.reduce_scatter
gather = _C.gather
gather_single = _C.gather_single
gather_into_tensor = gather_single
scatter = _C.scatter
all_to_all_single = _C.all_to_all_single
all_to_all = _C.all_to_all
