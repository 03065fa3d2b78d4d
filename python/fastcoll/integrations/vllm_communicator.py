# SPDX-License-Identifier: Apache-2.0
"""The device communicator that vLLM's CPU workers make for each of their groups.

Decides which of vLLM's calls fastcoll carries, and with which limit. The group stands for vLLM's
own, so the ranks may lie on several nodes. In a compiled model a call is an operator of `ops.py`. A
gather writes each rank's tensor to its place along any dimension, so no copy follows.
"""

from typing import Any, cast

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.utils import get_distributed_timeout_or_none
from vllm.logger import init_logger

import fastcoll
from fastcoll.api.groups import stand_in_for
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.settings import resolve
from fastcoll.errors import FastcollError
from fastcoll.integrations import ops

_GLOO_LIMIT_S = 1800.0  # torch's, which a program has where it names no other
_log = init_logger("vllm.fastcoll")  # vLLM shows its own loggers only


class FastcollCommunicator(CpuCommunicator):  # type: ignore[misc]
    """vLLM's communicator of one group of CPU workers, over fastcoll.

    Where fastcoll can't serve the group, which all ranks find together, it is vLLM's own.
    """

    def __init__(
        self,
        cpu_group: torch.distributed.ProcessGroup,
        device: torch.device | None = None,
        device_group: torch.distributed.ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        self._comm = _connect(device_group or cpu_group, unique_name)
        super().__init__(cpu_group, device, device_group, unique_name, use_all2all)
        if self._comm is not None:
            self.supports_tensor_dict = True

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        # False: vLLM makes no shared memory of its own.
        return self._comm is None and super()._all_group_ranks_share_shm_group_name()

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if self._comm is None:
            return cast(torch.Tensor, super().all_reduce(input_))
        if torch.compiler.is_compiling():
            return ops.all_reduce(input_, group=self.device_group)
        self._comm.all_reduce(input_)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self._comm is None or torch.compiler.is_compiling():
            return cast(torch.Tensor, super().all_gather(input_, dim))
        output = _whole(input_, dim, self.world_size)
        self._comm.all_gather(list(output.chunk(self.world_size, dim)), input_)
        return output

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        if self._comm is None:
            return cast(torch.Tensor | None, super().gather(input_, dst, dim))
        if self.rank_in_group != dst:
            self._comm.gather(input_, None, dst)
            return None
        output = _whole(input_, dim, self.world_size)
        self._comm.gather(input_, list(output.chunk(self.world_size, dim)), dst)
        return output

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int) -> None:
        if self._comm is None:
            super().send_tensor_dict(tensor_dict, dst)
            return
        tensors = [one.contiguous() for one in tensor_dict.values() if torch.is_tensor(one)]
        shapes = {
            key: (one.shape, one.dtype) if torch.is_tensor(one) else one
            for key, one in tensor_dict.items()
        }
        keys = [key for key, one in tensor_dict.items() if torch.is_tensor(one)]
        self._comm.send_object_list([shapes, keys], dst)
        for work in [self._comm.isend(one, dst) for one in tensors if one.numel()]:
            work.wait()

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        if self._comm is None:
            return dict(super().recv_tensor_dict(src))
        received: list[Any] = [None, None]
        self._comm.recv_object_list(received, src)
        found, keys = received
        for key in keys:
            shape, dtype = found[key]
            found[key] = torch.empty(shape, dtype=dtype, device="cpu")
        for work in [self._comm.irecv(found[key], src) for key in keys if found[key].numel()]:
            work.wait()
        return dict(found)

    def destroy(self) -> None:
        super().destroy()
        if self._comm is not None:
            self._comm.close()


def _connect(group: torch.distributed.ProcessGroup, name: str) -> BaseGroup | None:
    """Return the communicator that stands for a group of vLLM's, or None; the same on all ranks."""
    if torch.distributed.get_world_size(group) == 1:
        return None
    limit = get_distributed_timeout_or_none()
    limit_s = limit.total_seconds() if limit is not None else _GLOO_LIMIT_S
    try:
        comm = stand_in_for(group, resolve(limit_s, None))
    except FastcollError as error:
        _log.warning("vLLM's group %s keeps vLLM's own communicator: %s", name, error)
        return None
    _log.info("vLLM's group %s communicates through fastcoll %s", name, fastcoll.__version__)
    return comm


def _whole(part: torch.Tensor, dim: int, world_size: int) -> torch.Tensor:
    """Return an empty tensor for the tensors of all ranks, side by side along a dimension."""
    shape = list(part.shape)
    shape[dim] *= world_size
    return part.new_empty(shape)
