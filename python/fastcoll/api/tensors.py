# SPDX-License-Identifier: Apache-2.0
"""Symmetric tensors: their memory lies in the group's shared region.

Decides the group that a tensor belongs to. Must not know how the region is laid out.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fastcoll.api.groups import GroupLike, communicator_of
from fastcoll.calls.arrays import Array, refuse_moved, view
from fastcoll.errors import UsageError
from fastcoll.types import TORCH_DTYPES


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Make a symmetric tensor: one that the ranks reduce in place, without a copy. Collective.

    Every rank must call this in the same order and for the same number of bytes. The memory comes
    back once the tensor is gone on every rank. On a GPU it is used again in stream order. The
    stream of a new tensor waits for the stream that made the old one. It waits for those of
    fastcoll's calls with it, too. If a program uses a tensor in other streams, let one of these
    wait for them before the tensor goes. The memory stays readable after the group is closed. In a
    group over several nodes the ranks of each node share their own memory. One trip between the
    nodes tells all ranks whether all have it. torch refuses to resize the tensor's storage. Copies
    of it (`clone()`, `torch.load`) are ordinary tensors.

    Args:
        size: The shape, as integers or as one sequence.
        dtype: None takes torch's default.
        device: Where it lies, the same kind on every rank: None or "cpu", or this rank's CUDA
            device or its number. The memory there grows by FASTCOLL_GPU_HEAP_MIB.
        group: The group that shares the memory: a Group or a torch process group; None is
            the default group.

    Raises:
        UsageError: The shape, the dtype or the device is none.
        DesyncError: The ranks asked for different numbers of bytes; nothing was allocated.
        DriverError: A rank has no room for it; nothing was allocated, on no rank.
        UnsupportedError: There is no such device, or the ranks can't reach each other's.
    """
    comm = communicator_of(group)
    if comm is None:
        raise UsageError("empty(): this rank is not in the group")
    return comm.empty(*size, dtype=dtype, device=device)


def zeros(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    group: GroupLike = None,
) -> torch.Tensor:
    """Make a symmetric tensor of zeros; see `empty`. Collective."""
    return empty(*size, dtype=dtype, device=device, group=group).zero_()


def from_tensor(tensor: Array, group: GroupLike = None) -> torch.Tensor:
    """Make a symmetric copy of a tensor or a NumPy array; see `empty`. Collective."""
    given = view(tensor, "tensor", gpu=True)
    refuse_moved(given, "tensor")
    array = given.source
    if isinstance(array, np.ndarray):
        # As bytes: torch does not take arrays of every type and stride.
        data = np.array(array, order="C").reshape(-1).view(np.uint8)
        source = torch.from_numpy(data).view(TORCH_DTYPES[given.dtype]).reshape(given.shape)
    else:
        source = array.detach()
    copy = empty(source.shape, dtype=source.dtype, device=source.device, group=group)
    return copy.copy_(source)
