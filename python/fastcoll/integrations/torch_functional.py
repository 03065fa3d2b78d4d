# SPDX-License-Identifier: Apache-2.0
"""The functional operators of torch that can't call a group in Python.

torch's operators call a group in C++, and that calls the methods of a group in Python. Two have no
way there: they look for a backend in C++ and find none. The compiler makes one of joined
all_gathers, and one of `batch_isend_irecv`. So they get kernels here, which give torch its own back
for all other groups.

Decides who carries out these operators. Must not know how.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DispatchKey

from fastcoll.integrations.torch_base import BaseProcessGroup

_DEVICES = ("CPU", "CUDA")
_library: Any = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]


def serve_python_groups() -> None:
    """Let torch's operators reach groups in Python; once is enough."""
    for name, kernel in _KERNELS.items():
        if not hasattr(torch.ops._c10d_functional, name):  # of a newer torch
            continue
        for device in _DEVICES:
            operator = f"_c10d_functional::{name}"
            if not torch._C._dispatch_has_kernel_for_dispatch_key(operator, device):
                _library.impl(name, kernel, device)


def _all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    if (group := _find_python_group(group_name)) is None:
        operator = torch.ops._c10d_functional.all_gather_into_tensor_out
        of_torch: torch.Tensor = _by_torch(operator, input, group_size, group_name, out=out)
        return of_torch
    _register(out, group.all_gather_single(out, input))
    return out


def _batch_p2p_ops(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: list[torch.Tensor],
    group_name: Any,
) -> list[torch.Tensor]:
    if (group := _find_python_group(group_name)) is None:
        operator = torch.ops._c10d_functional.batch_p2p_ops
        of_torch: list[torch.Tensor] = _by_torch(
            operator, op_list, peer_list, tag_list, tensors, group_name
        )
        return of_torch
    device = tensors[0].device
    group._start_coalescing(device)
    results = []
    try:
        for name, tensor, peer, tag in zip(op_list, tensors, peer_list, tag_list, strict=True):
            sends = name == "isend"
            (group.send if sends else group.recv)([tensor], peer, tag)
            results.append(tensor.new_empty(0) if sends else tensor)  # as torch's own
    finally:
        work = group._end_coalescing(device)
    for result in results:
        _register(result, work)
    return results


_KERNELS = {
    "all_gather_into_tensor_out": _all_gather_into_tensor_out,
    "batch_p2p_ops": _batch_p2p_ops,
}


def _find_python_group(group_name: Any) -> Any:
    """Return the group in Python that is meant; None if it is none."""
    find: Any = dist.distributed_c10d._resolve_process_group
    group = find(group_name) if isinstance(group_name, str) else group_name
    return group if isinstance(group, BaseProcessGroup) else None


def _by_torch(operator: Any, *args: Any, **options: Any) -> Any:
    """Call torch's own kernel, which is the same for every device."""
    return operator.default._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **options)


def _register(tensor: torch.Tensor, work: Any) -> None:
    """Let torch's `wait_tensor` wait for the call that a tensor stands for."""
    torch._C._distributed_c10d._register_work(tensor, work)
