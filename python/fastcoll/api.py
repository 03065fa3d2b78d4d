# SPDX-License-Identifier: Apache-2.0
"""The functions of the module.

The verbs are C functions, so that a call whose plan is known needs no Python; what they can't
do themselves they pass on to the Python functions here, whose names start with an underscore.
"""

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch

from fastcoll import _C
from fastcoll.calls import Call
from fastcoll.errors import UsageError
from fastcoll.groups import GroupLike, communicator_of, member_of, rank_in
from fastcoll.memory.array import Array, view
from fastcoll.memory.tensor_layout import learn_tensor_layout
from fastcoll.types import REDUCE_OPS, TORCH_DTYPES, ReduceOp, Verb
from fastcoll.work import Work

# ---- symmetric tensors ---------------------------------------------------------------------------


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Make a symmetric tensor: one that the ranks reduce in place, without a copy. Collective.

    Every rank must call this in the same order and for the same number of bytes. The memory comes
    back once the tensor is gone on every rank. It stays readable after the group is closed. In a
    group over several nodes the ranks of each node share their own, and all ranks hear in one trip
    between the nodes whether all have theirs. torch refuses to resize the tensor's storage; copies
    of it (`clone()`, `torch.load`) are ordinary tensors.

    Args:
        size: The shape, as integers or as one sequence.
        dtype: None takes torch's default.
        device: Where it lies, the same kind on every rank: None or "cpu", or this rank's CUDA
            device, where FASTCOLL_GPU_HEAP_MIB says how much there is.
        group: The group that shares the memory: a Communicator or a torch process group; None is
            the default group.

    Raises:
        DesyncError: The ranks asked for different numbers of bytes; nothing was allocated.
        DriverError: A rank has no room for it; nothing was allocated, on no rank.
        UnsupportedError: There is no such device, or the ranks can't reach each other's.
    """
    comm = communicator_of(group)
    if comm is None:
        raise UsageError("empty(): this rank is not in the group")
    return comm.empty(*size, dtype=dtype, device=device)


def zeros(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Make a symmetric tensor of zeros; see `empty`. Collective."""
    return empty(*size, dtype=dtype, device=device, group=group).zero_()


def from_tensor(tensor: Array, group: GroupLike = None) -> torch.Tensor:
    """Make a symmetric copy of a tensor or a NumPy array; see `empty`. Collective."""
    given = view(tensor, "tensor", gpu=True)
    if isinstance(tensor, np.ndarray):
        # As bytes: torch does not take arrays of every type and stride.
        data = np.array(tensor, order="C").reshape(-1).view(np.uint8)
        source = torch.from_numpy(data).view(TORCH_DTYPES[given.dtype]).reshape(given.shape)
    else:
        source = tensor.detach()
    copy = empty(source.shape, dtype=source.dtype, device=source.device, group=group)
    return copy.copy_(source)


# ---- verbs: what the C functions of the same names pass on ---------------------------------------


def _issue(group: GroupLike, call: Call) -> Work | None:
    comm = member_of(group, call.verb.name, timeout_s=call.timeout_s, stacklevel=4)
    return None if comm is None else comm.issue(call)


def _all_reduce(
    tensor: Array,
    op: object = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    out: Array | None = None,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
) -> Work | None:
    """Reduce a tensor over all ranks; every rank gets the result. Collective.

    Args:
        tensor: A tensor on the CPU or a CUDA device, or a NumPy array, of the same number of
            elements and dtype on every rank; overwritten with the result unless `out` is given.
        op: What to reduce with.
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once and reduce in the background.
        out: Where the result goes, of the shape and dtype of `tensor`.
        algorithm: "auto", "one_shot", "two_shot", "ring", "chain", on GPUs "multimem", "nccl" or
            "copy_engine", or on CPUs "schedule:NAME" with a name that `fastcoll schedule` knows.
            "ring", "multimem" and most schedules add in another order than that of the ranks:
            where that may show, they need `numerics="fast"`. Over several nodes "auto" alone.
        numerics: "same_bits" or "fast"; None takes the group's.
        timeout_s: Limit of this call; None takes the group's.

    Returns:
        A Work if `async_op`, else None.

    Raises:
        UsageError: The arguments do not fit together; nothing was sent.
        UnsupportedError: No such operation on this dtype, no such memory, or an algorithm that is
            not for this call; nothing was sent.
        DesyncError: The ranks made different calls.
        CollectiveTimeout: A rank did not come within the limit.
        PeerLostError: A rank died.
    """
    return _issue(
        group,
        Call(
            verb=Verb.all_reduce,
            input=tensor,
            output=tensor if out is None else out,
            op=op,
            async_op=async_op,
            algorithm=algorithm,
            numerics=numerics,
            timeout_s=timeout_s,
        ),
    )


def _reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: object = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    numerics: str | None = None,
    timeout_s: float | None = None,
) -> Work | None:
    """Reduce a tensor over all ranks; rank r gets the r-th part of the result. Collective.

    Args:
        output: Where this rank's part goes.
        input: What to reduce: `world_size` times as many elements as `output`.
        op: See `all_reduce`, as for the other arguments, the result and the errors.
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once.
        algorithm: "auto", "one_shot", "two_shot", "ring", "chain", on GPUs "multimem" or "nccl",
            or on CPUs "schedule:NAME" with a name that `fastcoll schedule` knows.
        numerics: "same_bits" or "fast".
        timeout_s: Limit of this call.
    """
    return _issue(
        group,
        Call(
            verb=Verb.reduce_scatter,
            input=input,
            output=output,
            op=op,
            async_op=async_op,
            algorithm=algorithm,
            numerics=numerics,
            timeout_s=timeout_s,
        ),
    )


def _all_gather_into_tensor(
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
        input_tensor: What this rank gives, of the same number of elements and dtype everywhere.
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
    """
    return _issue(
        group,
        Call(
            verb=Verb.all_gather,
            input=input_tensor,
            output=output_tensor,
            async_op=async_op,
            timeout_s=timeout_s,
        ),
    )


def _broadcast(
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
        tensor: What to send on rank `src`, where to put it on the others.
        src: Rank in the group; the global rank if `group` is a torch process group.
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once.
        timeout_s: Limit of this call.
        group_src: In place of `src`: a rank of the group, whatever kind that is.
    """
    return _issue(
        group,
        Call(
            verb=Verb.broadcast,
            input=tensor,
            output=tensor,
            root=rank_in(group, src, "src", group_src),
            async_op=async_op,
            timeout_s=timeout_s,
        ),
    )


def _barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    *,
    timeout_s: float | None = None,
) -> Work | None:
    """Wait until every rank has come here. Collective.

    Args:
        group: A Communicator or a torch process group; None is the default group.
        async_op: Return a Work at once.
        device_ids: Changes nothing: no device takes part. torch.distributed has it for NCCL.
        timeout: Limit of this call, as torch.distributed takes it.
        timeout_s: The same in seconds.
    """
    del device_ids
    if timeout is not None and timeout_s is not None:
        raise UsageError("give timeout or timeout_s, not both")
    limit = timeout_s if timeout is None else timeout
    return _issue(group, Call(verb=Verb.barrier, async_op=async_op, timeout_s=limit))


_C.set_reduce_ops(REDUCE_OPS)
# Whether C++ knows this torch's tensors; if not, every call takes the Python path.
READS_TENSORS = learn_tensor_layout()
_C.set_tensor_types((torch.Tensor, torch.nn.Parameter))
_C.set_numpy_type(np.ndarray)
_C.set_numpy_integers(tuple({np.dtype(code).type for code in np.typecodes["AllInteger"]}))
_C.set_fallback("all_reduce", _all_reduce)
_C.set_fallback("reduce_scatter_tensor", _reduce_scatter_tensor)
_C.set_fallback("all_gather_into_tensor", _all_gather_into_tensor)
_C.set_fallback("broadcast", _broadcast)
_C.set_fallback("barrier", _barrier)

all_reduce = _C.all_reduce
reduce_scatter_tensor = _C.reduce_scatter_tensor
all_gather_into_tensor = _C.all_gather_into_tensor
# As torch.distributed calls them from 2.13 on.
reduce_scatter_single = reduce_scatter_tensor
all_gather_single = all_gather_into_tensor
broadcast = _C.broadcast
barrier = _C.barrier
