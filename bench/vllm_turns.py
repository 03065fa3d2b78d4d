# SPDX-License-Identifier: Apache-2.0
"""The communicator of a vLLM engine whose generations take turns between libraries.

Two starts of one engine differ by up to 1.9 times, which hides small effects. Here each worker has
the communicators of all libraries, and `vllm_engine.py` names the next one before each generation.
All libraries are called through one operator of this file. So the gain by fastcoll's own operator
in a compiled model is not seen.
"""

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from fastcoll.integrations.vllm_communicator import FastcollCommunicator

FASTCOLL, SHARED_MEMORY, GLOO, SILENT = "fastcoll", "vllm", "gloo", "silent"


class ByTurns(CpuCommunicator):  # type: ignore[misc]
    """Communicates through the library that was named last; "silent" communicates nothing."""

    def __init__(
        self,
        cpu_group: Any,
        device: Any = None,
        device_group: Any = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        place = (cpu_group, device, device_group, unique_name, use_all2all)
        super().__init__(*place)
        self._modules = {SHARED_MEMORY: self.dist_module, GLOO: torch.distributed}
        self._library = GLOO
        self._takes_turns = unique_name.startswith("tp") and self.world_size > 1
        if self._takes_turns:
            self._fastcoll = FastcollCommunicator(*place)
            _taking_turns.append(self)

    def use_library(self, name: str) -> None:
        self._library = name
        self.dist_module = self._modules.get(name, torch.distributed)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if not self._takes_turns:
            return super().all_reduce(input_)  # type: ignore[no-any-return]
        torch.ops.fastcoll_bench.all_reduce_by_turns(input_)
        return input_

    def all_reduce_now(self, tensor: torch.Tensor) -> None:
        if self._library == FASTCOLL:
            self._fastcoll.all_reduce(tensor)
        elif self._library != SILENT:
            super().all_reduce(tensor)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self._library == FASTCOLL:
            return self._fastcoll.all_gather(input_, dim)
        if self._library == SILENT:
            return torch.cat([input_] * self.world_size, dim)
        return super().all_gather(input_, dim)  # type: ignore[no-any-return]


_taking_turns: list[ByTurns] = []


class WorkerByTurns:
    """A base class of vLLM's workers. The engine calls its method on all of them."""

    def use_library(self, name: str) -> None:
        (communicator,) = _taking_turns
        communicator.use_library(name)


@torch.library.custom_op("fastcoll_bench::all_reduce_by_turns", mutates_args=("tensor",))
def all_reduce_by_turns(tensor: torch.Tensor) -> None:
    _taking_turns[0].all_reduce_now(tensor)


@all_reduce_by_turns.register_fake
def _all_reduce_of_fakes(tensor: torch.Tensor) -> None:
    del tensor
