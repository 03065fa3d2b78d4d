# SPDX-License-Identifier: Apache-2.0
"""Tensors on blocks of the symmetric heap.

Decides how a torch tensor is laid on foreign memory and how its end is noticed. Must not know
groups; `owner` is whatever has to live as long as the memory is used.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence

import torch

from fastcoll.memory.heap import Block


def tensor_on(
    block: Block,
    shape: Sequence[int],
    dtype: torch.dtype,
    owner: object,
    release: Callable[[int], None],
) -> torch.Tensor:
    """Return a tensor on `block`; `release` is told the block's id when its storage dies."""
    memory = (ctypes.c_char * max(1, block.num_bytes)).from_address(block.ptr)
    memory.owner = owner  # type: ignore[attr-defined]
    finalizer = weakref.finalize(memory, release, block.block_id)
    finalizer.atexit = False  # at exit the memory goes with the process
    if block.num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    # set_ and not a view: the tensor shall be its own base.
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage, 0, torch.Size(shape))  # type: ignore[call-overload]
    return tensor
