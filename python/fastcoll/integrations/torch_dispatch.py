# SPDX-License-Identifier: Apache-2.0
"""The calls of a Python group as torch's dispatcher shows them.

Programs watch torch's operators by modes (FakeTensorMode, CommDebugMode, their own) and by classes
of tensors. A backend in C++ is called through such operators, "c10d::allreduce_" and others. A
group in Python is called at once, so nobody would see its calls. Where somebody watches, a plain
group of torch's stands in for it and calls the operator. A mode of ours, below all others, gets
what these leave of the call and carries it out. The phases of a call are shown to nobody.

Decides when a call goes that way. Must not know the verbs.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fastcoll.integrations.torch_base import BaseProcessGroup
from fastcoll.integrations.torch_work import TorchWork

try:
    from torch._C import (
        DispatchKey,
        TensorBase,
        _dispatch_keys,
        _get_dispatch_mode,
        _get_tracing_state,
        _len_torch_dispatch_stack,
        _pop_torch_dispatch_stack,
        _push_on_torch_dispatch_stack,
        _TorchDispatchModeKey,
    )
except ImportError:  # a torch without these names: nobody sees the calls of its Python groups
    _CAN_BE_WATCHED = False
else:
    _CAN_BE_WATCHED = True

CarryOut = Callable[..., TorchWork | None]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMESPACE = "c10d"
_MODES_OF_TORCH = ("FAKE", "PROXY", "FUNCTIONAL")


def is_watched(args: Sequence[Any]) -> bool:
    """Return whether a call is to be seen as its operator: by a mode, or for a tensor in `args`.

    A tensor of a class is for that class to see. Calls of meta tensors are for torch, which moves
    nothing. torch.jit.trace refuses these operators. Without them it would not learn of the call,
    and what it traced would leave the call out.
    """
    return _CAN_BE_WATCHED and (
        _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
        or _has_any(args, _needs_dispatch)
    )


def _has_any(given: Sequence[Any], has: Callable[[Any], bool]) -> bool:
    """Return whether a tensor, also in lists, has something."""
    for one in given:  # each call of a Python group comes here
        kind = type(one)
        if kind is list or kind is tuple:
            if _has_any(one, has):
                return True
        elif isinstance(one, TensorBase) and has(one):
            return True
    return False


def _is_for_meta(args: Sequence[Any]) -> bool:
    """Return whether torch takes its kernel for meta tensors: it looks into no list of lists."""
    for one in args:
        tensors = one if isinstance(one, list | tuple) else (one,)
        if any(isinstance(tensor, TensorBase) and tensor.is_meta for tensor in tensors):
            return True
    return False


def _has_class(tensor: torch.Tensor) -> bool:
    return type(tensor) not in _PLAIN and _dispatch_keys(tensor).has(DispatchKey.Python)


def _needs_dispatch(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or _has_class(tensor)


def through_dispatcher(
    group: BaseProcessGroup,
    method: str,
    carry_out: CarryOut,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> TorchWork | None:
    """Call the operator of a group's method; `carry_out` makes the call itself.

    Returns:
        The handle, as `carry_out` returns it; that of a mode which makes no call of it.
    """
    watcher = _Lowest(lambda *args, **kwargs: carry_out(group, *args, **kwargs), args, kwargs)
    with _push_below_all(watcher):
        work: TorchWork | None = getattr(_shown(group), method)(*args, **kwargs)
    return watcher.work if watcher.has_run else work


class _Shown(ProcessGroup):
    """A plain group in a group's place, equal to it: so torch's tables of groups have it, too.

    LocalTensorMode takes the group out of an operator's arguments and looks there for its ranks.
    """

    def __init__(self, group: BaseProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._stands_for = weakref.ref(group)  # which holds this one
        self._hash = hash(group)

    def __eq__(self, other: object) -> bool:
        return other is not None and (other is self or other is self._stands_for())

    def __hash__(self) -> int:
        return self._hash


def _shown(group: BaseProcessGroup) -> Any:
    """Return the plain group that stands for a group in its operators."""
    if group.shown is None:
        group.shown = _Shown(group)
        group.shown._set_group_name(group.getGroupName())
        group.shown._set_group_desc(group.getGroupDesc())
    return group.shown


@contextmanager
def _push_below_all(mode: TorchDispatchMode) -> Iterator[None]:
    """Put a mode below those that are set; torch's own stay below all others by their kind."""
    above = [_pop_torch_dispatch_stack(None) for _ in range(_len_torch_dispatch_stack())]
    _push_on_torch_dispatch_stack(mode)
    for one in reversed(above):
        _push_on_torch_dispatch_stack(one)
    try:
        yield
    finally:
        for _ in above:
            _pop_torch_dispatch_stack(None)
        _pop_torch_dispatch_stack(None)
        for one in reversed(above):
            _push_on_torch_dispatch_stack(one)


class _Lowest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries out a call when its operator comes to it."""

    def __init__(self, carry_out: CarryOut, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._carry_out = carry_out
        self._given = list(args), kwargs
        self.has_run = False
        self.work: TorchWork | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out the call, unless a mode or class of torch's has still to see it.

        Calls of meta tensors remain torch's: it has kernels for them, which move nothing.
        """
        del types
        keys = (getattr(_TorchDispatchModeKey, name) for name in _MODES_OF_TORCH)
        is_torchs = any(_get_dispatch_mode(key) is not None for key in keys)
        if func.namespace != _NAMESPACE or is_torchs:
            return func(*args, **(kwargs or {}))
        if _has_any(args, _has_class):
            return NotImplemented  # the class comes next, and then this mode again
        if _is_for_meta(args):
            return func(*args, **(kwargs or {}))
        self.has_run = True
        given, options = self._with_tensors(args)
        self.work = self._carry_out(*given, **options)
        handle = (self.work or TorchWork(())).boxed()
        results = [handle if "Work" in str(one.type) else args[0] for one in func._schema.returns]
        return results[0] if len(results) == 1 else tuple(results)

    def _with_tensors(self, args: Sequence[Any]) -> tuple[Any, Any]:
        """Return the arguments with the operator's tensors: a class may have replaced its own.

        Of a negated tensor torch may give the operator an ordinary copy. The call gets the tensor
        itself: the program would not see the result in a copy.
        """
        coming = iter([one for one in tree_leaves(args) if isinstance(one, torch.Tensor)])

        def replaced(one: torch.Tensor) -> torch.Tensor:
            seen = next(coming)
            return one if one.is_neg() and not seen.is_neg() else seen

        given: tuple[Any, Any] = tree_map_only(torch.Tensor, replaced, self._given)
        return given
