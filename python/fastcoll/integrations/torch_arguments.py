# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments of a torch process group's methods: tensors, and options of a call.

torch itself gives lists of one, and an object of options. Users may give the tensor alone, and the
options' values: torch's short forms. Decides the meaning of either. Must not know groups.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.types import REDUCE_OPS, OpLike, ReduceOp

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Sequence[torch.Tensor]]
One = Tensors | torch.Tensor  # a list of one tensor, or the tensor itself
Limit = timedelta | None


def op_of(opts: Any) -> OpLike:
    """Return the reduction, as the object that the C functions know, where there is one."""
    if opts is None:
        return ReduceOp.SUM
    op = opts.reduceOp
    code = hash(op)  # asking for `op.op`, and that for its number, takes half a microsecond
    known: OpLike = REDUCE_OPS[code] if code < len(REDUCE_OPS) else op
    return known


def root_of(opts: Any) -> int:
    return opts.rootRank if opts is not None else 0


def one_of(tensors: One) -> torch.Tensor:
    if type(tensors) is not list and isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UnsupportedError(f"a rank gives one tensor to a call, not {len(tensors)}")
    return tensors[0]


def parts_of(lists: Lists | Tensors) -> Tensors | None:
    """Return the tensors of a list of one list, or that were given without it; of none: None."""
    if not lists:
        return None
    if isinstance(lists[0], torch.Tensor):
        return lists  # type: ignore[return-value]
    if len(lists) != 1:
        raise UnsupportedError(f"a rank gives one list of tensors to a call, not {len(lists)}")
    return lists[0]


def options_of(kind: type[Any], timeout: Limit, **values: object) -> Any:
    """Return the options of a call in torch's short form; None is torch's default."""
    opts = kind()
    for name, value in {"timeout": timeout, **values}.items():
        if value is not None:
            try:
                setattr(opts, name, value)
            except TypeError:
                raise UsageError(
                    f"{value!r} can't be the {name} of torch's {kind.__name__}"
                ) from None
    return opts
