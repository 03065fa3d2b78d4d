# SPDX-License-Identifier: Apache-2.0
"""The Python group with its calls as events of torch's profiler.

Decides the name of an event, the inputs whose shapes it shows, and its end: with the call, or when
an asynchronous call is complete. Inside it is the event of torch's operator, "c10d::allreduce_" or
another. All events of Gloo are asynchronous, so those of a group that stands in for it are, too.
The C++ backend (c10d_backend.cpp) makes its events itself, by the same names (torch_names.py). It
also tells each Work the type of its call.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._C._distributed_c10d as torchs_c10d
from torch.autograd import _record_function_with_args_enter as begin_event
from torch.autograd import _record_function_with_args_exit as end_event
from torch.distributed import ProcessGroup

from fastcoll.integrations.torch_base import GLOO
from fastcoll.integrations.torch_dispatch import is_watched, through_dispatcher
from fastcoll.integrations.torch_group import FastcollProcessGroup
from fastcoll.integrations.torch_names import TORCH_CALLS, TorchCall
from fastcoll.integrations.torch_work import TorchWork

c10d: Any = torchs_c10d  # its stubs lack OpType


class ProfiledProcessGroup(FastcollProcessGroup):
    """A torch process group whose calls a communicator carries out, seen by torch's profiler."""


def _watched(method: str, described: TorchCall) -> Callable[..., TorchWork | None]:
    plain = _plain(method, described)
    recorded = _recorded(plain, described)
    if not hasattr(ProcessGroup, method) or method == "_end_coalescing":  # no operator has it
        return recorded

    def operator(self: ProfiledProcessGroup, *args: Any, **kwargs: Any) -> TorchWork | None:
        return through_dispatcher(self, method, plain, args, kwargs)

    def call(self: ProfiledProcessGroup, *args: Any, **kwargs: Any) -> TorchWork | None:
        if is_watched(args):
            return through_dispatcher(self, method, recorded, args, kwargs)
        if torch.autograd._profiler_enabled():
            # An operator's event ends those inside it, so the call's own event is around it.
            return _in_event(described.title(self.events), operator)(self, *args, **kwargs)
        return plain(self, *args, **kwargs)

    call.__name__, call.__doc__ = method, plain.__doc__
    return call


def _plain(method: str, described: TorchCall) -> Callable[..., TorchWork | None]:
    op_type = int(getattr(c10d.OpType, described.op_type))

    def call(self: ProfiledProcessGroup, *args: Any, **kwargs: Any) -> TorchWork | None:
        work: TorchWork | None = getattr(FastcollProcessGroup, method)(self, *args, **kwargs)
        if work is not None:
            work.op_type = op_type
        return work

    call.__name__, call.__doc__ = method, getattr(FastcollProcessGroup, method).__doc__
    return call


def _recorded(
    plain: Callable[..., TorchWork | None], described: TorchCall
) -> Callable[..., TorchWork | None]:
    def call(self: ProfiledProcessGroup, *args: Any, **kwargs: Any) -> TorchWork | None:
        if not torch.autograd._profiler_enabled():
            return plain(self, *args, **kwargs)
        return _in_event(described.title(self.events), plain)(self, *args, **kwargs)

    call.__name__, call.__doc__ = plain.__name__, plain.__doc__
    return call


def _in_event(
    title: str, carry_out: Callable[..., TorchWork | None]
) -> Callable[..., TorchWork | None]:
    def call(self: ProfiledProcessGroup, *args: Any, **kwargs: Any) -> TorchWork | None:
        event = begin_event(title, *_inputs_of(*args))
        try:
            work = carry_out(self, *args, **kwargs)
        except BaseException:
            end_event(event)
            raise
        if work is not None:
            work.end_with(event)
        elif self.events == GLOO:
            waited = TorchWork(())
            waited.end_with(event)
            waited.wait()
        else:
            end_event(event)
        return work

    return call


def _inputs_of(first: Any = None, second: Any = None, *_: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call reads: in torch's methods outputs come before inputs."""
    yield from _tensors_in(second if isinstance(second, torch.Tensor | list) else first)


def _tensors_in(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list):
        for one in given:
            yield from _tensors_in(one)


for _call in TORCH_CALLS:
    for _method in (_call.method, *_call.older):
        setattr(ProfiledProcessGroup, _method, _watched(_method, _call))
