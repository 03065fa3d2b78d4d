# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel on groups of the backend "fastcoll".

Decides what DDP needs changed for such a group: its check of the ranks' parameters, its built-in
hook, the names in its logs. Must not know how a group is made or carries out a call.
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fastcoll.api.groups import existing_communicator
from fastcoll.errors import DesyncError, FastcollError
from fastcoll.integrations.torch_base import NAME
from fastcoll.integrations.torch_group import FastcollProcessGroup


def serve_ddp() -> None:
    """Let DDP work on groups of this backend. Called once."""
    _replace_hook_in_cpp()
    _compare_parameters_on_all_ranks()


def _is_fastcolls(group: Any) -> bool:
    return any(group._get_backend(device).name() == NAME for device in group._device_types)


def _compare_parameters_on_all_ranks() -> None:
    """Let all ranks raise where their models differ.

    In torch's check a rank compares its shapes with rank 0's and raises alone. Rank 0 would train
    on: it only sent its shapes. No rank compares the dtypes.
    """
    torchs = dist._verify_params_across_processes

    @wraps(torchs)
    def verify(group: Any, tensors: list[torch.Tensor], logger: Any = None) -> None:
        comm = existing_communicator(group) if _is_fastcolls(group) else None
        said = error = None
        try:
            torchs(group, tensors, logger)
        except FastcollError:
            raise
        except RuntimeError as found:
            if comm is None:
                raise
            said, error = str(found), found
        if comm is None:
            return
        seen: list[Any] = [None] * comm.world_size
        comm.all_gather_object(seen, (said, [str(tensor.dtype) for tensor in tensors]))
        if difference := _difference(seen):
            raise DesyncError(
                f'DistributedDataParallel in group "{comm.name}": {difference}. Give it the same '
                "model on every rank; the group can still be used"
            ) from error

    dist._verify_params_across_processes = verify  # type: ignore[assignment]


def _difference(seen: Sequence[tuple[str | None, list[str]]]) -> str | None:
    """Return what differs between the ranks: torch's error on the first that has one, or dtypes."""
    for said, _ in seen:
        if said is not None:
            return said.rstrip(".")
    for rank, (_, dtypes) in enumerate(seen):
        for i, (dtype, first) in enumerate(zip(dtypes, seen[0][1], strict=True)):
            if dtype != first:
                return f"params[{i}] is of {dtype} on rank {rank}, and of {first} on rank 0"
    return None


def name_in_logs() -> None:
    """Let DDP's logs have the group's name; torch writes "custom" for all that are not its own."""
    torchs: Any = DistributedDataParallel._get_ddp_logging_data

    @wraps(torchs)
    def with_name(self: DistributedDataParallel) -> Any:
        data = torchs(self)
        group: Any = self.process_group
        if _is_fastcolls(group):
            data["backend_name"] = dist.get_backend(group)
        return data

    DistributedDataParallel._get_ddp_logging_data = with_name  # type: ignore[method-assign]


def _replace_hook_in_cpp() -> None:
    """Let a Python group have DDP's built-in FP16 hook: torch's in C++ refuses Python's futures."""
    torchs = DistributedDataParallel._register_builtin_comm_hook

    @wraps(torchs)
    def register(self: DistributedDataParallel, comm_hook_type: dist.BuiltinCommHookType) -> None:
        is_fp16 = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        if is_fp16 and isinstance(self.process_group, FastcollProcessGroup):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            self.register_comm_hook(self.process_group, fp16_compress_hook)
            assert self.logger is not None
            self.logger._set_comm_hook_name(str(comm_hook_type))  # as torch's own registration does
        else:
            torchs(self, comm_hook_type)  # type: ignore[no-untyped-call]

    DistributedDataParallel._register_builtin_comm_hook = register  # type: ignore[method-assign]
