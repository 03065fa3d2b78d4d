# SPDX-License-Identifier: Apache-2.0
"""The functional operator of torch that can't call a group in Python.

torch's operators call a group in C++, and that calls the methods of a group in Python. For
`all_gather_into_tensor_out` torch has no way there: it looks for a backend in C++ and finds none.
The compiler makes that operator of joined all_gathers. So it gets a kernel here, which gives torch
its own back for all other groups.

Decides who carries out that operator. Must not know how.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C import DispatchKey

from fastcoll.integrations.torch_base import BaseProcessGroup

_NAME = "all_gather_into_tensor_out"
_DEVICES = ("CPU", "CUDA")
_library: Any = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]


def serve_python_groups() -> None:
    """Let torch's operator reach groups in Python; once is enough."""
    for device in _DEVICES:
        name = f"_c10d_functional::{_NAME}"
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, device):
            _library.impl(_NAME, _all_gather_into_tensor_out, device)


def _all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    find: Any = dist.distributed_c10d._resolve_process_group
    group = find(group_name) if isinstance(group_name, str) else group_name
    if not isinstance(group, BaseProcessGroup):
        operator = torch.ops._c10d_functional.all_gather_into_tensor_out.default
        key = DispatchKey.CompositeExplicitAutograd  # torch's own kernel, for every device
        of_torch: torch.Tensor = operator._op_dk(key, input, group_size, group_name, out=out)
        return of_torch
    work = group.all_gather_single(out, input)
    torch._C._distributed_c10d._register_work(out, work)  # `wait_tensor` waits for it
    return out
