# SPDX-License-Identifier: Apache-2.0
"""The verbs for JAX arrays on CPUs: by themselves, and within `jit`, `grad`, `vmap` and loops.

    import fastcoll.jax

    @fastcoll.jax.jit
    def step(x):
        return fastcoll.jax.all_reduce(x) / 2

Arrays are not changed; each verb returns its result. Every process has one CPU device, and the
ranks make the same calls in the same order. Calls keep the order of the program, inside a compiled
program and from one program to the next of a thread, for all groups together. With NumPy arrays or
tensors on the same group, first wait for programs that still run: `jax.effects_barrier()`.

`jax.vmap` makes one larger call of a batch. The gradients of all_reduce, all_gather and broadcast
take the result for one value that every rank has and uses alike, as a loss. So `jax.grad` of it is
the derivative with respect to this rank's own input, and moves no data. Where ranks use a result
differently, pass it through `vary`. Other verbs say so where they have a gradient.

A call outside of a program raises fastcoll's errors. A compiled program raises JAX's, once its
result is used: `jax.errors.JaxRuntimeError` or ValueError, with the class and the text of that
error. So do the programs that were started meanwhile. Those of `jax.jit` repeat it, until a call
outside of programs has raised it, too, or a new group is used, as `shrink()` makes one.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("fastcoll.jax needs JAX: pip install 'fastcoll[jax]'") from error

from fastcoll.api.groups import GroupLike, communicator_of, rank_in
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.tensors import checked_integer, checked_rank, known_reduction
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.types import DType, Op, ReduceOp

try:
    from fastcoll.integrations import jax_calls, jax_programs, jax_rules
except (AttributeError, ImportError) as error:  # what JAX calls private may change
    raise ImportError(
        f"fastcoll.jax was tested with JAX 0.10.2 and does not work with {jax.__version__}: {error}"
    ) from error

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MOST_TAG = 2**31


def _array(x: Any, verb: str) -> jax.Array:
    array = x if isinstance(x, jax.Array) else jnp.asarray(x)
    _check_dtype(array.dtype, verb)
    return array


@functools.lru_cache(maxsize=256)
def _check_dtype(dtype: Any, verb: str) -> None:
    if dtype.name not in DType.__members__:
        names = ", ".join(DType.__members__)
        raise UnsupportedError(f"{verb}: the array has dtype {dtype.name}; supported are {names}")


def _group(group: GroupLike, verb: str) -> BaseGroup:
    comm = communicator_of(group)
    if comm is None:
        raise UsageError(f"{verb}: this rank is not in the group")
    return comm


@functools.lru_cache(maxsize=4096)
def _call(verb: str, comm: BaseGroup, op: Op = Op.SUM, **others: int) -> jax_calls.Call:
    number = jax_calls.number_of(comm)
    return jax_calls.Call(verb, number, comm.rank, comm.world_size, op, **others)


def _root(group: GroupLike, comm: BaseGroup, rank: object, name: str) -> int:
    found = rank_in(group, checked_integer(rank, f"{name} must be a rank"), name)
    return checked_rank(found, name, comm.world_size)


def _tag(tag: object) -> int:
    number = checked_integer(tag, "tag must be an integer")
    if not 0 <= number < _MOST_TAG:
        raise UsageError(f"tag={number} must be at least 0 and below {_MOST_TAG}")
    return number


def jit(fun: _Function, **options: Any) -> _Function:
    """Compile a function as `jax.jit` does, to programs with collectives that start at once.

    `jax.jit` works, too, but takes several hundred us to start such a program. It hands the order
    of collectives on in Python; the programs of this function take it among their arguments.
    Within other transformations it is `jax.jit`.

    Args:
        fun: The function.
        options: Those of `jax.jit`.

    Returns:
        The compiled function, with the arguments and results of `fun`.
    """
    return jax_programs.jit(fun, **options)  # type: ignore[return-value]


def all_reduce(x: Any, op: object = ReduceOp.SUM, group: GroupLike = None) -> jax.Array:
    """Reduce an array over all ranks; every rank gets the result. Collective.

    With SUM and AVG it has a gradient: the cotangent of the result, on each rank.

    Args:
        x: This rank's input, of one shape and dtype on all ranks.
        op: The reduction.
        group: A Communicator or a torch process group; None is the default group.

    Returns:
        The result, of the shape and dtype of `x`.

    Raises:
        UsageError: The arguments do not fit together; nothing was sent.
        UnsupportedError: There is no such operation, dtype, device or gradient; nothing was sent.
        DesyncError: The ranks made different calls.
        CollectiveTimeout: A rank did not come within the group's limit.
        PeerLostError: A rank died.
    """
    array = _array(x, "all_reduce")
    comm = _group(group, "all_reduce")
    return _issue(_call("all_reduce", comm, _reduction(op, array.dtype)), array)


def reduce_scatter(x: Any, op: object = ReduceOp.SUM, group: GroupLike = None) -> jax.Array:
    """Reduce an array over all ranks; rank r gets the r-th part of the result. Collective.

    With SUM and AVG it has a gradient: an all_gather of the ranks' cotangents.

    Args:
        x: This rank's input, of shape `(world_size, ...)`.
        op: See `all_reduce`, as for the other arguments and the errors.
        group: A Communicator or a torch process group; None is the default group.

    Returns:
        This rank's part, of the shape of `x[0]`.
    """
    array = _array(x, "reduce_scatter")
    comm = _group(group, "reduce_scatter")
    return _issue(_call("reduce_scatter", comm, _reduction(op, array.dtype)), array)


def all_gather(x: Any, group: GroupLike = None) -> jax.Array:
    """Collect the arrays of all ranks; every rank gets all of them. Collective.

    Its gradient is this rank's part of the cotangent.

    Args:
        x: This rank's array, of one shape and dtype on all ranks.
        group: A Communicator or a torch process group; None is the default group.

    Returns:
        An array of shape `(world_size, *x.shape)`, by rank.
    """
    return _issue(_call("all_gather", _group(group, "all_gather")), _array(x, "all_gather"))


def all_to_all(x: Any, group: GroupLike = None) -> jax.Array:
    """Give each rank a part of this rank's array, and get one from each. Collective.

    Its gradient is an all_to_all of the ranks' cotangents.

    Args:
        x: An array of shape `(world_size, ...)`, whose r-th part goes to rank r.
        group: A Communicator or a torch process group; None is the default group.

    Returns:
        An array of the same shape, whose r-th part comes from rank r.
    """
    return _issue(_call("all_to_all", _group(group, "all_to_all")), _array(x, "all_to_all"))


def broadcast(x: Any, src: int, group: GroupLike = None) -> jax.Array:
    """Copy one rank's array to all others. Collective.

    Its gradient is the cotangent on rank `src`, and 0 on the others.

    Args:
        x: The array on rank `src`; on the others, one of its shape and dtype.
        src: Rank in the group; the global rank if `group` is a torch process group.
        group: A Communicator or a torch process group; None is the default group.

    Returns:
        The array of rank `src`.
    """
    comm = _group(group, "broadcast")
    root = _root(group, comm, src, "src")
    return _issue(_call("broadcast", comm, root=root), _array(x, "broadcast"))


def reduce(x: Any, dst: int, op: object = ReduceOp.SUM, group: GroupLike = None) -> jax.Array:
    """Reduce an array over all ranks; rank `dst` gets the result. Collective; without a gradient.

    Args:
        x: This rank's input, of one shape and dtype on all ranks.
        dst: Rank in the group; the global rank if `group` is a torch process group.
        op: See `all_reduce`.
        group: A Communicator or a torch process group; None is the default group.

    Returns:
        The result on rank `dst`, and `x` on the others.
    """
    array, comm = _array(x, "reduce"), _group(group, "reduce")
    root = _root(group, comm, dst, "dst")
    return _issue(_call("reduce", comm, _reduction(op, array.dtype), root=root), array)


def gather(x: Any, dst: int, group: GroupLike = None) -> jax.Array:
    """Collect the arrays of all ranks on one of them. Collective; without a gradient.

    Args:
        x: This rank's array, of one shape and dtype on all ranks.
        dst: Rank in the group; the global rank if `group` is a torch process group.
        group: A Communicator or a torch process group; None is the default group.

    Returns:
        On rank `dst` an array of shape `(world_size, *x.shape)`, by rank; `x` on the others.
    """
    comm = _group(group, "gather")
    root = _root(group, comm, dst, "dst")
    return _issue(_call("gather", comm, root=root), _array(x, "gather"))


def scatter(x: Any, src: int, group: GroupLike = None) -> jax.Array:
    """Give each rank a part of one rank's array. Collective; without a gradient.

    Args:
        x: On rank `src` an array of shape `(world_size, ...)`; on the others, one of the shape and
            dtype of a part.
        src: Rank in the group; the global rank if `group` is a torch process group.
        group: A Communicator or a torch process group; None is the default group.

    Returns:
        This rank's part.
    """
    comm = _group(group, "scatter")
    root = _root(group, comm, src, "src")
    return _issue(_call("scatter", comm, root=root), _array(x, "scatter"))


def send(x: Any, dst: int, group: GroupLike = None, tag: int = 0) -> None:
    """Send an array to another rank, which calls `recv` or `sendrecv`; without a gradient.

    It may wait until the other rank receives. Two ranks that first send to each other and then
    receive may run into the group's limit: they call `sendrecv`.

    Args:
        x: The array.
        dst: Rank in the group; the global rank if `group` is a torch process group.
        group: A Communicator or a torch process group; None is the default group.
        tag: A number that the receiver gives, too.
    """
    comm = _group(group, "send")
    dest = _root(group, comm, dst, "dst")
    _issue(_call("send", comm, dest=dest, tag=_tag(tag)), _array(x, "send"))


def recv(like: Any, src: int, group: GroupLike = None, tag: int = 0) -> jax.Array:
    """Receive an array from another rank; without a gradient.

    Args:
        like: An array or a `jax.ShapeDtypeStruct` with the shape and dtype that the sender's has.
        src: Rank in the group; the global rank if `group` is a torch process group.
        group: A Communicator or a torch process group; None is the default group.
        tag: The number that the sender gives.

    Returns:
        The array. `like` is not changed.
    """
    comm = _group(group, "recv")
    source = _root(group, comm, src, "src")
    return _issue(_call("recv", comm, source=source, tag=_tag(tag)), _like(like, "recv"))


def sendrecv(
    x: Any, like: Any, dst: int, src: int, group: GroupLike = None, tag: int = 0
) -> jax.Array:
    """Send an array to a rank and receive one from a rank, at the same time.

    Its gradient sends the cotangent of the result back, and receives that of `x`.

    Args:
        x: The array for rank `dst`.
        like: An array or a `jax.ShapeDtypeStruct` with the shape and dtype of the one from `src`.
        dst: Rank in the group; the global rank if `group` is a torch process group.
        src: The same.
        group: A Communicator or a torch process group; None is the default group.
        tag: The number of both.

    Returns:
        The array from rank `src`.
    """
    comm = _group(group, "sendrecv")
    dest, source = _root(group, comm, dst, "dst"), _root(group, comm, src, "src")
    call = _call("sendrecv", comm, dest=dest, source=source, tag=_tag(tag))
    return _issue(call, _array(x, "sendrecv"), _like(like, "sendrecv"))


def barrier(group: GroupLike = None) -> None:
    """Wait until all ranks have come here, in the order of the other calls. Collective.

    Args:
        group: A Communicator or a torch process group; None is the default group.
    """
    _issue(_call("barrier", _group(group, "barrier")))


def vary(x: Any, group: GroupLike = None) -> jax.Array:
    """Return an array that all ranks have alike, and that they use differently from here on.

    It moves no data. Its gradient is the all_reduce of the ranks' cotangents. So it belongs before
    the weights that are cut over the ranks, and to parameters that all ranks share.

    Args:
        x: The array.
        group: A Communicator or a torch process group; None is the default group.
    """
    call = _call("all_reduce", _group(group, "vary"))
    result: jax.Array = jax_rules.local_p.bind(_array(x, "vary"), call=call)
    return result


def _like(like: Any, verb: str) -> jax.Array:
    if isinstance(like, jax.ShapeDtypeStruct):
        return jnp.zeros(like.shape, like.dtype)
    return _array(like, verb)


@functools.lru_cache(maxsize=1024)
def _reduction(op: Any, dtype: Any) -> Op:
    return known_reduction(op, DType[dtype.name])


def _issue(call: jax_calls.Call, *arrays: jax.Array) -> jax.Array:
    result: jax.Array = jax_calls.issue(call, *arrays)
    return result


__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "jit",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sendrecv",
    "vary",
]
