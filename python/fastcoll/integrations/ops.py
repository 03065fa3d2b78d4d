# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""The verbs as operators of torch: with gradients, and known to its compiler.

`all_reduce(x)` and its fellows here return a new tensor and leave `x` alone. They can be
differentiated, any number of times, backward and forward, batched by `torch.func.vmap`, and stand
in compiled graphs. The gradients are those of the sum of all ranks' losses: a number that went to
every rank gets the sum of their gradients. A tangent goes to the ranks of its number. All ranks
take the same steps: a derivative of a collective is a collective, too.

Decides the operators' schemas, shapes and gradients; the other derivatives follow from these in
`derivatives.py`. Must not know how a graph names a group: that is `graph_names.py`. When the
compiler gets the operators is for `compile.py` to say.
"""

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from fastcoll.api.groups import GroupLike
from fastcoll.calls.tensors import reduction_numbered
from fastcoll.errors import UsageError
from fastcoll.integrations import c10d_build, derivatives, row_ops
from fastcoll.integrations.graph_names import named, traced_code, traced_name, traced_root
from fastcoll.types import Op

DIRECT = "direct"  # in torch.ops.fastcoll: the operators as plain functions


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
    return cast(Tensor, torch.ops.fastcoll.all_reduce(x, traced_code(op), traced_name(group)))


def reduce_scatter(x: Tensor, op: object = "sum", group: GroupLike = None) -> Tensor:
    """Return this rank's part of the reduction of `x` over all ranks. Collective.

    Args:
        x: [world_size * n, ...]; the result is [n, ...].
        op: See `all_reduce`, as for the group and the errors.
        group: The group.
    """
    return cast(Tensor, torch.ops.fastcoll.reduce_scatter(x, traced_code(op), traced_name(group)))


def all_gather(x: Tensor, group: GroupLike = None) -> Tensor:
    """Return the tensors of all ranks one after another: [world_size * n, ...]. Collective.

    Args:
        x: [n, ...], of the same shape and dtype on every rank.
        group: See `all_reduce`.
    """
    return cast(Tensor, torch.ops.fastcoll.all_gather(x, traced_name(group)))


def broadcast(x: Tensor, src: int, group: GroupLike = None) -> Tensor:
    """Return rank `src`'s tensor, on every rank. Collective.

    Args:
        x: The tensor to send on rank `src`; of the others only shape and dtype count.
        src: Rank in the group; the global rank if `group` is a torch process group.
        group: See `all_reduce`.
    """
    name = traced_name(group)
    return cast(Tensor, torch.ops.fastcoll.broadcast(x, traced_root(src, group), name))


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
            x, output_split_sizes or [], input_split_sizes or [], traced_name(group)
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
    terms = eps, offset, rounds_first, wide_sum, traced_code(op), traced_name(group)
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
