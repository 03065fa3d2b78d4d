# SPDX-License-Identifier: Apache-2.0
"""Tensors on blocks of the symmetric heap.

Decides how a torch tensor is laid on foreign memory and how its end is noticed. Must not know
groups; `owner` is an object that has to live as long as the memory is used.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastcoll.errors import UsageError
from fastcoll.memory.heap import Block


def device_of(device: object) -> torch.device:
    """Return the device that a user means: None is the CPU, an integer a GPU."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    named: Any = f"cuda:{device}" if is_index else device
    try:
        return torch.device("cpu" if device is None else named)
    except (RuntimeError, TypeError):
        raise UsageError(
            f'device must be None, a torch.device, or its name as "cpu" or "cuda:1", not {device!r}'
        ) from None


def bytes_at(ptr: int, num_bytes: int, device: int) -> torch.Tensor:
    """Return memory of a GPU as bytes; they do not keep it alive."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")
    return torch.as_tensor(_DeviceMemory(ptr, num_bytes, None), device=f"cuda:{device}")


def tensor_on(
    block: Block,
    shape: Sequence[int],
    dtype: torch.dtype,
    owner: object,
    release: Callable[[int], None],
    device: int = -1,
) -> torch.Tensor:
    """Return a tensor on `block`; `release` is told the block's id when its storage dies.

    `device` is the GPU that the block lies on; -1 for the CPU.
    """
    memory: Any
    if device < 0:
        memory = (ctypes.c_char * max(1, block.num_bytes)).from_address(block.ptr)
        memory.owner = owner
    else:
        memory = _DeviceMemory(block.ptr, block.num_bytes, owner)
    finalizer = weakref.finalize(memory, release, block.block_id)
    finalizer.atexit = False  # at exit the memory goes with the process
    place = "cpu" if device < 0 else f"cuda:{device}"
    if block.num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device=place)
    raw = (
        torch.frombuffer(memory, dtype=torch.uint8)
        if device < 0
        else torch.as_tensor(memory, device=place)
    )
    # set_ and not a view: the tensor shall be its own base.
    tensor = torch.empty(0, dtype=dtype, device=place)
    tensor.set_(raw.untyped_storage(), 0, torch.Size(shape))  # type: ignore[call-overload]
    return tensor


class _DeviceMemory:
    """Bytes on a GPU, as torch takes them over: it keeps this object while a tensor lives."""

    def __init__(self, ptr: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (ptr, False),
            "strides": None,
        }
