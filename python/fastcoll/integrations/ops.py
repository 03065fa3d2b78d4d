# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""The verbs as operators of torch: with gradients, and known to its compiler.

`all_reduce(x)` and its fellows here return a new tensor and leave `x` alone. They can be
differentiated, any number of times, backward and forward, batched by `torch.func.vmap`, and stand
in compiled graphs. The gradients are those of the sum of all ranks' losses: a number that went to
every rank gets the sum of their gradients. A tangent goes to the ranks of its number. All ranks
take the same steps: a derivative of a collective is a collective, too.

Decides the operators' schemas, shapes and gradients; the other derivatives follow from these in
`derivatives.py`. A graph holds no objects, so it knows a group by a name. Must not know when the
compiler gets them: that is `compile.py`.
"""

import itertools
import weakref
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fastcoll.api.groups import GroupLike, communicator_of, existing_communicator, named_rank
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.tensors import reduction_numbered
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.integrations import c10d_build, derivatives, row_ops
from fastcoll.types import BY_NAME, REDUCE_OPS, Op

DIRECT = "direct"  # in torch.ops.fastcoll: the operators as plain functions
_DEFAULT = ""  # the default group, whichever it is when the graph runs
# Stands before torch's name of a group, which is looked up when the graph runs.
_OF_TORCH = "torch:"
_groups: weakref.WeakValueDictionary[str, BaseGroup] = weakref.WeakValueDictionary()
_numbers = itertools.count()


# ---- the constants that stand for objects in a graph ---------------------------------------------


def name_of(group: GroupLike) -> str:
    """Return the name by which the operators know a group; makes the group if it is not yet."""
    # While it traces, the compiler has a stand-in for a process group.
    comm = communicator_of(getattr(group, "real_obj", group))
    if comm is None:
        raise UsageError("this rank is not in the group: it can't make an operator's call there")
    if group is None:
        return _DEFAULT
    for name, known in _groups.items():
        if known is comm:
            return name
    name = f"{comm.name}#{next(_numbers)}"
    _groups[name] = comm
    return name


def name_at_torch(name: object) -> str | None:
    """Return the operators' name of the group that torch knows by a name.

    None where fastcoll is not its backend on CPUs: torch's own calls go elsewhere there.
    """
    return None if _backing(name) is None else f"{_OF_TORCH}{name}"


def _backing(name: object) -> BaseGroup | None:
    """Return the communicator that is the backend on CPUs of torch's group of a name."""
    c10d = dist.distributed_c10d
    try:
        group = c10d._resolve_process_group(name)  # type: ignore[arg-type]
        backends = dist.get_backend_config(group)
    except (LookupError, RuntimeError, TypeError, ValueError):  # no group, or not one of this rank
        return None
    return existing_communicator(group) if "cpu:fastcoll" in backends.split(",") else None


def named(name: str) -> BaseGroup:
    """Return the group of a name.

    Raises:
        UsageError: It is gone.
    """
    comm = communicator_of(None) if name == _DEFAULT else _groups.get(name)
    if comm is None and name.startswith(_OF_TORCH):
        comm = _backing(name.removeprefix(_OF_TORCH))
    if comm is None:
        raise UsageError(f'the group "{name}" of this operator is gone: trace the program again')
    return comm


def code_of(op: object) -> int:
    """Return the number by which the operators know a reduction."""
    if isinstance(op, str) and op in BY_NAME:
        return int(BY_NAME[op])
    for code, known in enumerate(REDUCE_OPS):
        if op == known:
            return code
    raise UnsupportedError(f"{op} is not one of {', '.join(one.name for one in Op)}")


def _word(op: object) -> object:
    """Return the name of a reduction: before torch 2.13 a graph can't hold a ReduceOp."""
    name = getattr(op, "name", None)
    return op if name is None else name.lower()


def members_of(group: GroupLike) -> tuple[int, ...]:
    """Return the ranks of a group as its callers number them: globally for torch's groups."""
    group = getattr(group, "real_obj", group)
    comm = communicator_of(group)
    return tuple(named_rank(group, rank) for rank in range(comm.world_size if comm else 0))


def _root_of(src: int, group: GroupLike) -> int:
    """Return the group rank of a root.

    `src` is compared with one member after another. So the compiler sees that the graph holds for
    this root alone, also where it has taken `src` for a number that varies.
    """
    members = members_of(group)
    for root, member in enumerate(members):
        if member == src:
            return root
    raise UsageError(f"src={src} is not one of the group's ranks {members}")


# ---- the functions -------------------------------------------------------------------------------


def all_reduce(x: Tensor, op: object = "sum", group: GroupLike = None) -> Tensor:
    """Return the reduction of `x` over all ranks. Collective, as its gradient is.

    Args:
        x: Of the same shape and dtype on every rank.
        op: The reduction; SUM and AVG have derivatives.
        group: A Group or a torch process group; None is the default group.

    Raises:
        UnsupportedError: A derivative of another operation was asked for.
        FastcollError: See `fastcoll.all_reduce`.
    """
    return cast(Tensor, torch.ops.fastcoll.all_reduce(x, code_of(_word(op)), name_of(group)))


def reduce_scatter(x: Tensor, op: object = "sum", group: GroupLike = None) -> Tensor:
    """Return this rank's part of the reduction of `x` over all ranks. Collective.

    Args:
        x: [world_size * n, ...]; the result is [n, ...].
        op: See `all_reduce`, as for the group and the errors.
        group: The group.
    """
    return cast(Tensor, torch.ops.fastcoll.reduce_scatter(x, code_of(_word(op)), name_of(group)))


def all_gather(x: Tensor, group: GroupLike = None) -> Tensor:
    """Return the tensors of all ranks one after another: [world_size * n, ...]. Collective.

    Args:
        x: [n, ...], of the same shape and dtype on every rank.
        group: See `all_reduce`.
    """
    return cast(Tensor, torch.ops.fastcoll.all_gather(x, name_of(group)))


def broadcast(x: Tensor, src: int, group: GroupLike = None) -> Tensor:
    """Return rank `src`'s tensor, on every rank. Collective.

    Args:
        x: The tensor to send on rank `src`; of the others only shape and dtype count.
        src: Rank in the group; the global rank if `group` is a torch process group.
        group: See `all_reduce`.
    """
    name = name_of(group)
    return cast(Tensor, torch.ops.fastcoll.broadcast(x, _root_of(src, group), name))


def all_to_all(
    x: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Give every rank its rows of `x`; return this rank's rows of theirs. Collective.

    Args:
        x: [rows, ...]: those for rank 0, 1, ..., one after another.
        output_split_sizes: Rows that come from each rank; None: as many as go there.
        input_split_sizes: Rows that go to each rank; None: equally many to each. Both or neither.
        group: See `all_reduce`.
    """
    if (output_split_sizes is None) != (input_split_sizes is None):
        raise UsageError("all_to_all() takes the split sizes of both sides, or of neither")
    return cast(
        Tensor,
        torch.ops.fastcoll.all_to_all(
            x, output_split_sizes or [], input_split_sizes or [], name_of(group)
        ),
    )


def all_reduce_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounds_first: bool = False,
    wide_sum: bool = False,
    op: object = "sum",
    group: GroupLike = None,
) -> tuple[Tensor, Tensor]:
    """Return the normalised rows of a sum over all ranks, and the sum itself. Collective.

    The sum has the residual added, and both have the bits of `fastcoll.RMSNorm`. The gradient is
    collective, too; there is no derivative forwards.

    Args:
        x: [..., columns] of float32, float16 or bfloat16 on the CPU, alike on every rank.
        residual: Of the shape and dtype of `x`; None: nothing is added.
        weight: [columns]; None: ones.
        eps: Added to the mean of the squares.
        offset: Added to the weight.
        rounds_first: Round to the dtype before the weight.
        wide_sum: Normalise the sum with the residual before it is rounded.
        op: SUM or AVG.
        group: See `all_reduce`, as for the errors.
    """
    terms = eps, offset, rounds_first, wide_sum, code_of(_word(op)), name_of(group)
    normed, summed = torch.ops.fastcoll.all_reduce_rms_norm(x, residual, weight, *terms)
    return normed, summed


# ---- the operators -------------------------------------------------------------------------------

_library = torch.library.Library("fastcoll", "DEF")
_library.define("all_reduce(Tensor x, int op, str group) -> Tensor")
_library.define("reduce_scatter(Tensor x, int op, str group) -> Tensor")
_library.define("all_gather(Tensor x, str group) -> Tensor")
_library.define("broadcast(Tensor x, int root, str group) -> Tensor")
_library.define("reduce(Tensor x, int root, str group) -> Tensor")
_library.define(
    "all_to_all(Tensor x, SymInt[] output_splits, SymInt[] input_splits, str group) -> Tensor"
)


def _rows(x: Tensor, num_rows: int) -> Tensor:
    """Return an empty tensor of as many rows as are wanted, like those of `x`."""
    return x.new_empty((num_rows, *x.shape[1:]))


def _all_reduce(x: Tensor, op: int, group: str) -> Tensor:
    result = x.new_empty(x.shape)
    named(group).all_reduce(x, reduction_numbered(op), out=result)
    return result


def _scattered(x: Tensor, op: int, group: str) -> Tensor:
    """Return where the result of `reduce_scatter` goes."""
    del op
    num_ranks = named(group).world_size
    if x.dim() == 0 or x.shape[0] % num_ranks:
        raise UsageError(
            f"reduce_scatter(): a tensor of shape {tuple(x.shape)} can't be cut by rows into "
            f"{num_ranks} equal parts"
        )
    return _rows(x, x.shape[0] // num_ranks)


def _reduce_scatter(x: Tensor, op: int, group: str) -> Tensor:
    result = _scattered(x, op, group)
    named(group).reduce_scatter_tensor(result, x, reduction_numbered(op))
    return result


def _gathered(x: Tensor, group: str) -> Tensor:
    """Return where the result of `all_gather` goes."""
    if x.dim() == 0:
        raise UsageError("all_gather(): a tensor without dimensions has no rows to join")
    return _rows(x, x.shape[0] * named(group).world_size)


def _all_gather(x: Tensor, group: str) -> Tensor:
    result = _gathered(x, group)
    named(group).all_gather_into_tensor(result, x)
    return result


def _broadcast(x: Tensor, root: int, group: str) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    named(group).broadcast(result, root)
    return result


def _reduce(x: Tensor, root: int, group: str) -> Tensor:
    """Sum; zeros on all ranks but the root. The gradient of a broadcast, as that is of this."""
    result, comm = x.clone(memory_format=torch.contiguous_format), named(group)
    comm.reduce(result, root)
    return result if comm.rank == root else result.zero_()


def _shuffled(x: Tensor, output_splits: list[int], input_splits: list[int], group: str) -> Tensor:
    """Return where the result of `all_to_all` goes."""
    del group
    return _rows(x, sum(output_splits) if input_splits else x.shape[0])


def _all_to_all(x: Tensor, output_splits: list[int], input_splits: list[int], group: str) -> Tensor:
    result = _shuffled(x, output_splits, input_splits, group)
    # Empty lists stand for no split sizes: a group has a rank at least.
    named(group).all_to_all_single(result, x, output_splits or None, input_splits or None)
    return result


# ---- their gradients -----------------------------------------------------------------------------


def _reduce_scatter_gradient(gradient: Tensor, op: int, group: str) -> Tensor:
    everybodys = cast(Tensor, torch.ops.fastcoll.all_gather(gradient, group))
    return everybodys / named(group).world_size if op == int(Op.AVG) else everybodys


def _all_gather_gradient(gradient: Tensor, group: str) -> Tensor:
    return cast(Tensor, torch.ops.fastcoll.reduce_scatter(gradient, int(Op.SUM), group))


def _all_to_all_gradient(
    gradient: Tensor, output_splits: list[int], input_splits: list[int], group: str
) -> Tensor:
    back = torch.ops.fastcoll.all_to_all(gradient, input_splits, output_splits, group)
    return cast(Tensor, back)


# ---- the registration with torch -----------------------------------------------------------------

# By the operators' names: what each does, and what autograd runs in its place.
_functions: dict[str, Any] = {}
_gradients: dict[str, Any] = {}


def _define(name: str, run: Any, fake: Any, gradient: derivatives.Gradient) -> None:
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastcoll::{name}", fake, lib=_library)
    _functions[name] = run
    _gradients[name] = derivatives.register(_library, name, gradient)
    # Else the compiler may drop calls, or put them in another order on another rank.
    torch.library._register_effectful_op(
        f"fastcoll::{name}", torch.library.EffectType.ORDERED, lib=_library
    )


def _same(x: Tensor, *terms: object) -> Tensor:
    """Return an empty result of the shape of each rank's input."""
    del terms
    return x.new_empty(x.shape)


# Every rank takes the same steps, zeros or not: a second derivative is collective, too.
_define("all_reduce", _all_reduce, _same, torch.ops.fastcoll.all_reduce)
_define("reduce_scatter", _reduce_scatter, _scattered, _reduce_scatter_gradient)
_define("all_gather", _all_gather, _gathered, _all_gather_gradient)
_define("broadcast", _broadcast, _same, torch.ops.fastcoll.reduce)
_define("reduce", _reduce, _same, torch.ops.fastcoll.broadcast)
_define("all_to_all", _all_to_all, _shuffled, _all_to_all_gradient)

_functions[row_ops.NAME], _gradients[row_ops.NAME] = row_ops.define(_library, named)
_operators = {name: getattr(torch.ops.fastcoll, name).default for name in _functions}
OPERATORS = tuple(_operators.values())

# Compiled code calls these (lowered.py). Where the compiled backend is, it runs the calls that need
# no Python.
_direct = SimpleNamespace(**_operators)
setattr(torch.ops.fastcoll, DIRECT, _direct)


def _serve_by(compiled: ModuleType) -> None:
    vars(_direct).update(compiled.serve_operators(_operators, _functions, _gradients, named))


# Groups of fastcoll.init have use for it, too. This decides nothing for groups of torch's, of which
# one may be the first to ask for the compiled backend.
c10d_build.load()
c10d_build.give_once_loaded(_serve_by)
