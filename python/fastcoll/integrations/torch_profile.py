# SPDX-License-Identifier: Apache-2.0
"""The Python group with its calls as events of torch's profiler.

Decides the name of an event and its end: with the call, or when an asynchronous call is complete.
The C++ backend (c10d_backend.cpp) makes its events itself, by the same names (torch_names.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function

from fastcoll.integrations.torch_group import FastcollProcessGroup
from fastcoll.integrations.torch_names import TORCH_CALLS, TorchCall
from fastcoll.integrations.torch_work import TorchWork


class ProfiledProcessGroup(FastcollProcessGroup):
    """A torch process group whose calls a communicator carries out, seen by torch's profiler."""


def _recorded(method: str, described: TorchCall) -> Callable[..., TorchWork | None]:
    def call(self: ProfiledProcessGroup, *args: Any, **kwargs: Any) -> TorchWork | None:
        carry_out = getattr(FastcollProcessGroup, method)
        if not torch.autograd._profiler_enabled():
            work: TorchWork | None = carry_out(self, *args, **kwargs)
            return work
        event = record_function(described.title(self.events))
        with event:
            work = carry_out(self, *args, **kwargs)
            if work is not None:
                work.end_with(event)
        return work

    call.__name__, call.__doc__ = method, getattr(FastcollProcessGroup, method).__doc__
    return call


for _call in TORCH_CALLS:
    for _method in (_call.method, *_call.older):
        setattr(ProfiledProcessGroup, _method, _recorded(_method, _call))
