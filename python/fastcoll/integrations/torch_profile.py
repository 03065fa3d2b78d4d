# SPDX-License-Identifier: Apache-2.0
"""The Python group with its calls as events of torch's profiler.

Decides what an event is called and when it ends: with the call, of an asynchronous one when that is
complete. c10d_backend.cpp makes its events itself, by the same names (c10d_verbs.h).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function

from fastcoll.integrations.torch_base import NAME
from fastcoll.integrations.torch_group import FastcollProcessGroup
from fastcoll.integrations.torch_work import TorchWork

_EVENTS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "_all_gather_base",
    "_allgather_base": "_all_gather_base",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "_reduce_scatter_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "gather": "gather",
    "gather_single": "gather",
    "scatter": "scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "_end_coalescing": "coalesced",
}


class ProfiledProcessGroup(FastcollProcessGroup):
    """A torch process group whose calls a communicator carries out, seen by torch's profiler."""


def _recorded(method: str, title: str) -> Callable[..., TorchWork | None]:
    def call(self: ProfiledProcessGroup, *args: Any, **kwargs: Any) -> TorchWork | None:
        carry_out = getattr(FastcollProcessGroup, method)
        if not torch.autograd._profiler_enabled():
            work: TorchWork | None = carry_out(self, *args, **kwargs)
            return work
        event = record_function(title)
        with event:
            work = carry_out(self, *args, **kwargs)
            if work is not None:
                work.end_with(event)
        return work

    call.__name__, call.__doc__ = method, getattr(FastcollProcessGroup, method).__doc__
    return call


for _method, _event in _EVENTS.items():
    setattr(ProfiledProcessGroup, _method, _recorded(_method, f"{NAME}:{_event}"))
