# SPDX-License-Identifier: Apache-2.0
"""The verbs that reduce.

Each is a C function, so that a call with a known plan needs no Python. A call that C++ can't carry
out alone goes to the function here with an underscore before its name.
"""

from collections.abc import Sequence

from fastcoll.api.declared import verb
from fastcoll.api.groups import GroupLike, communicator_of, issue, member_of, nothing, rank_in
from fastcoll.calls.arrays import Array
from fastcoll.calls.epilogues import TritonEpilogue
from fastcoll.calls.parts import PartsCall
from fastcoll.calls.rows import RMSNorm
from fastcoll.calls.tensors import Call
from fastcoll.calls.work import Work
from fastcoll.errors import UsageError
from fastcoll.types import OpLike, Verb


@verb
def all_reduce(
    tensor: Array,
    op: OpLike = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    *,
    out: Array | None = None,
    then: RMSNorm | TritonEpilogue | None = None,
    wire: str | None = None,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
) -> Work | None:
    """Reduce a tensor over all ranks; every rank gets the result. Collective.

    Args:
        tensor: A tensor on the CPU or a CUDA device, or a NumPy array. It has the same number of
            elements and dtype on every rank. Overwritten with the result unless `out` is given.
        op: The reduction: a `ReduceOp`, or its name in lower case, as "max". AVG of integers is
            NCCL's: their sum, which wraps, is divided by the number of ranks and truncated towards
            zero. Booleans have no AVG.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once and reduce in the background.
        out: Where the result goes, of the shape and dtype of `tensor`.
        then: Steps of this rank on the result; theirs goes to `out` in its place. A `RMSNorm` is
            for tensors on the CPU, a `TritonEpilogue` for those on a CUDA device.
        wire: "int8", "fp8" or, of float32, "bf16": elements of a SUM or AVG of floats cross between
            nodes in this format, with a bounded loss (docs/numerics.md). It is the same on every
            rank. On one node it changes nothing. None: as the elements are.
        algorithm: "auto", "one_shot", "two_shot", "ring", "chain", on GPUs "multimem", "nccl" or
            "copy_engine", or on CPUs "schedule:NAME". NAME is one that `fastcoll schedule` knows.
            "ring", "multimem" and most schedules add in another order than that of the ranks. They
            need `numerics="fast"` where the result may differ. Over several nodes "auto" alone.
        numerics: "same_bits" or "fast"; None takes the group's.
        timeout_s: Limit of this call; None takes the group's.

    Returns:
        A Work if `async_op`, else None.

    Raises:
        UsageError: The arguments do not fit together; nothing was sent.
        UnsupportedError: No such operation, memory or algorithm for this call; nothing was sent.
        DesyncError: The ranks made different calls.
        CollectiveTimeout: A rank did not come within the limit.
        PeerLostError: A rank died.
    """
    call = Call(
        verb=Verb.all_reduce,
        input=tensor,
        output=tensor if out is None else out,
        op=op,
        async_op=async_op,
        then=then,
        wire=wire,
        algorithm=algorithm,
        numerics=numerics,
        timeout_s=timeout_s,
    )
    return issue(group, call)


@verb
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: OpLike = "sum",
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
        tensor: This rank's input; overwritten with the result on rank `dst` unless `out` is given,
            left alone on the others.
        dst: Rank in the group; the global rank if `group` is a torch process group.
        op: See `all_reduce`, as for the other arguments, the result and the errors.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        out: Where the result goes on rank `dst`, of the shape and dtype of `tensor`.
        algorithm: "auto", "one_shot", "two_shot", on GPUs "nccl", or on CPUs "schedule:NAME" with a
            name that `fastcoll schedule` knows.
        numerics: "same_bits" or "fast".
        timeout_s: Limit of this call.
        group_dst: In place of `dst`: a rank in the group, also for a torch process group.
    """
    call = Call(
        verb=Verb.reduce,
        input=tensor,
        output=tensor if out is None else out,
        op=op,
        root=rank_in(group, dst, "dst", group_dst),
        async_op=async_op,
        algorithm=algorithm,
        numerics=numerics,
        timeout_s=timeout_s,
    )
    return issue(group, call)


@verb
def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: OpLike = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    *,
    then: RMSNorm | TritonEpilogue | None = None,
    wire: str | None = None,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
) -> Work | None:
    """Reduce a tensor over all ranks; rank r gets the r-th part of the result. Collective.

    Args:
        output: Where this rank's part goes.
        input: This rank's input: `world_size` times as many elements as `output`.
        op: See `all_reduce`, as for the other arguments, the result and the errors.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        then: Steps of this rank on its part; see `all_reduce`. Theirs goes to `output`.
        wire: See `all_reduce`. Each rank's part is a message of its own.
        algorithm: "auto", "one_shot", "two_shot", "ring", "chain", on GPUs "multimem" or "nccl", or
            on CPUs "schedule:NAME" with a name that `fastcoll schedule` knows.
        numerics: "same_bits" or "fast".
        timeout_s: Limit of this call.
    """
    call = Call(
        verb=Verb.reduce_scatter,
        input=input,
        output=output,
        op=op,
        async_op=async_op,
        then=then,
        wire=wire,
        algorithm=algorithm,
        numerics=numerics,
        timeout_s=timeout_s,
    )
    return issue(group, call)


@verb
def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: OpLike = "sum",
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
        input_list: This rank's input for each rank. Shapes may differ from each other, and must be
            the same on all ranks. Then there is a reduce for each rank.
        op: See `all_reduce`, as for the other arguments, the result and the errors.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        algorithm: "auto", "one_shot", "two_shot", "ring", "chain", on GPUs "multimem" or "nccl", or
            on CPUs "schedule:NAME" with a name that `fastcoll schedule` knows.
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
    return nothing(async_op) if comm is None else comm.issue_reduce_scatter(call)


# As torch.distributed calls it from 2.13 on.
reduce_scatter_single = reduce_scatter_tensor


def prepare(
    tensor: Array,
    *,
    then: RMSNorm | TritonEpilogue,
    out: Array | None = None,
    group: GroupLike = None,
) -> None:
    """Compile what follows a reduction, so that no rank waits for it later. Collective.

    Call it before a capture, and before the first call of a kind where a second counts. It reduces
    nothing and writes nothing. It serves later calls with this `then`, and an output of this dtype,
    shape and place: `all_reduce(tensor, out=out, then=then)`, or for an `out` of another size
    `reduce_scatter_tensor(out, tensor, then=then)`. A group's first call on GPUs is no part of it.

    Args:
        tensor: As of the call.
        then: The `TritonEpilogue` of the calls; a `RMSNorm` needs no preparation.
        out: As of the call; None is `tensor` itself.
        group: A Group or a torch process group; None is the default group.

    Raises:
        UsageError: The arguments do not fit together; or a rank can't compile the function, on all
            ranks.
        UnsupportedError: No such epilogue for this memory or dtype; on this rank alone.
    """
    comm = communicator_of(group)
    if comm is None:
        raise UsageError("prepare(): this rank is not in the group")
    target = tensor if out is None else out
    is_part = getattr(target, "shape", None) != getattr(tensor, "shape", None)
    verb = Verb.reduce_scatter if is_part else Verb.all_reduce
    comm.prepare_call(Call(verb=verb, input=tensor, output=target, then=then))
