# SPDX-License-Identifier: Apache-2.0
"""The functions that take lists of tensors and make one call of them.

The public names are C functions (declared.py). A C function passes a call that it can't make on to
the function of the same name here.
"""

from collections.abc import Sequence

from fastcoll.api.declared import verb
from fastcoll.api.groups import GroupLike, issue
from fastcoll.calls.arrays import Array
from fastcoll.calls.lists import ListCall
from fastcoll.calls.work import Work
from fastcoll.types import OpLike, Verb


@verb
def all_reduce_coalesced(
    tensors: Sequence[Array],
    op: OpLike = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    *,
    wire: str | None = None,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
) -> Work | None:
    """Reduce each tensor of a list over all ranks, all of them in one call. Collective.

    The result has the bits of one `all_reduce` per tensor. It costs about as much as one
    `all_reduce` of their total size, as staging takes the tensors without a flat copy.
    Tensors of several dtypes make one such call for each dtype. Strided tensors are copied first.

    Args:
        tensors: A list or tuple of tensors or NumPy arrays of any shapes, overwritten with the
            results. Their number, dtypes and numbers of elements are the same on every rank, in
            the same order. They must not overlap. At least one.
        op: The reduction.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        wire: See `all_reduce`. Each tensor is a message of its own.
        algorithm: "auto", "one_shot" or "two_shot". Tensors on GPUs are reduced one by one, with
            the algorithms of `all_reduce`.
        numerics: "same_bits" or "fast"; None takes the group's.
        timeout_s: Limit of this call; None takes the group's.

    Returns:
        A Work if `async_op`, else None.

    Raises:
        UsageError: The arguments do not fit together; nothing was sent.
        UnsupportedError: No such operation on one of the dtypes, or no such memory; nothing was
            sent.
        DesyncError: The ranks made different calls, or their lists differ.
        CollectiveTimeout: A rank did not come within the limit.
        PeerLostError: A rank died.
    """
    call = ListCall(
        verb=Verb.all_reduce,
        inputs=tensors,
        outputs=tensors,
        op=op,
        async_op=async_op,
        wire=wire,
        algorithm=algorithm,
        numerics=numerics,
        timeout_s=timeout_s,
    )
    return issue(group, call, "all_reduce_coalesced")


@verb
def reduce_scatter_tensor_coalesced(
    outputs: Sequence[Array],
    inputs: Sequence[Array],
    op: OpLike = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
) -> Work | None:
    """Do a `reduce_scatter_tensor` for each tensor of a list, all in one call. Collective.

    Args:
        outputs: Where this rank's part of each result goes.
        inputs: The tensors to reduce, each with `world_size` times the elements of its output.
        op: See `all_reduce_coalesced`, as for the other arguments, the result and the errors.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        algorithm: "auto", "one_shot" or "two_shot".
        numerics: "same_bits" or "fast".
        timeout_s: Limit of this call.
    """
    call = ListCall(
        verb=Verb.reduce_scatter,
        inputs=inputs,
        outputs=outputs,
        op=op,
        async_op=async_op,
        algorithm=algorithm,
        numerics=numerics,
        timeout_s=timeout_s,
    )
    return issue(group, call, "reduce_scatter_tensor_coalesced")


@verb
def all_gather_into_tensor_coalesced(
    outputs: Sequence[Array],
    inputs: Sequence[Array],
    group: GroupLike = None,
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
) -> Work | None:
    """Do an `all_gather_into_tensor` for each tensor of a list, all in one call. Collective.

    Args:
        outputs: Where the results go: `world_size` times the elements of the input of the same
            index.
        inputs: This rank's inputs. See `all_reduce_coalesced` for the tensors that lists may hold,
            the result and the errors.
        group: A Group or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
    """
    call = ListCall(
        verb=Verb.all_gather, inputs=inputs, outputs=outputs, async_op=async_op, timeout_s=timeout_s
    )
    return issue(group, call, "all_gather_into_tensor_coalesced")
