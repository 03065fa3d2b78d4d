# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments of a torch process group's methods: tensors, and options of a call.

torch itself gives lists of one, and an object of options. Users may give the tensor alone, and the
options' values: torch's short forms. Decides the meaning of either. Must not know groups.
"""

from collections.abc import Sequence
from datetime import timedelta
from math import ceil
from typing import Any

import torch

from fastcoll.calls.limits import MOST_S, call_limit_s, seconds
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.types import REDUCE_OPS, OpLike, ReduceOp

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Sequence[torch.Tensor]]
One = Tensors | torch.Tensor  # a list of one tensor, or the tensor itself
Limit = timedelta | None


# Beyond 292 000 years torch's microseconds overflow: timedelta.max comes from it as -5.8e12 s.
_OVERFLOWN_S = -1e9


def limit_by_torch(timeout: timedelta) -> float:
    """Return a group's limit in seconds, as torch hands it on; the longest of timedelta.max."""
    limit_s = timeout.total_seconds()
    return MOST_S if limit_s < _OVERFLOWN_S else limit_s


def whole_milliseconds(timeout: timedelta | float) -> timedelta:
    """Return a limit that torch's C++, which cuts it to milliseconds, takes as it is.

    Cut, 0.9 ms would be 0, which is refused, and -1 ms would be no limit at all.

    Raises:
        UsageError: It is negative, or no number of seconds. 0 is Gloo's, and stays 0.
    """
    limit_s = 0.0 if seconds(timeout) == 0 else call_limit_s(timeout)
    return timedelta(milliseconds=ceil(limit_s * 1e3))


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
