# SPDX-License-Identifier: Apache-2.0
"""A group's calls on GPUs: from checked calls to its device group.

Decides when a group sets up its GPUs, which is at its first call with a tensor there. Must not
know how kernels are started.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastcoll.calls.group_calls import GpuCall
from fastcoll.calls.parts import PartsOperands
from fastcoll.calls.settings import Settings
from fastcoll.calls.tensors import Operands
from fastcoll.calls.transfers import Transfer
from fastcoll.calls.work import Work
from fastcoll.choose.planner import Planner
from fastcoll.errors import UsageError
from fastcoll.gpu.work import DeviceTransferWork
from fastcoll.machine import gpu
from fastcoll.native import _C

if TYPE_CHECKING:
    from fastcoll.gpu.group import DeviceGroup
    from fastcoll.gpu.host import DeviceHost


class GpuSide:
    """A group's side on GPUs; `group` is None until there is one."""

    def __init__(self, host: "DeviceHost", settings: Settings, planner: Planner) -> None:
        self._host = host
        self._settings = settings
        self._planner = planner
        self.group: DeviceGroup | None = None

    def on(self, device: int) -> "DeviceGroup":
        """Return the device group, made if there is none yet. Collective then.

        Raises:
            UsageError: It is another GPU's.
        """
        if self.group is None:
            gpu.require()
            # Only now: without GPUs there may be no such extension.
            from fastcoll.gpu.group import DeviceGroup

            no_table = self._planner.tuning.problem_on_gpus
            self.group = DeviceGroup(self._host, device, self._settings.gpu, no_table)
            self._host.use_gpu(self.group.known)
        if self.group.device != device:
            raise UsageError(
                f'group "{self._host.name}" works on cuda:{self.group.device} here, not on '
                f"cuda:{device}: a rank has one GPU; make another group for another one"
            )
        return self.group

    def issue(self, calls: Sequence[GpuCall], async_op: bool) -> Work | None:
        """Plan calls and start them as one."""
        starts: list[tuple[_C.Plan, Operands | PartsOperands, float]] = []
        for call, operands in calls:
            group = self.on(operands.device)
            plan = self._planner.plan(call, operands, group.terms)
            starts.append((plan, operands, self._settings.gpu_limit_of(call.timeout_s)))
        return group.run(starts, async_op=async_op)

    def transfer(
        self, transfers: Sequence[Transfer], async_op: bool
    ) -> Sequence[DeviceTransferWork]:
        """Start sends and receives as one."""
        group = self.on(transfers[0].array.device)
        return group.transfer(transfers, self._settings.gpu.timeout_s, async_op=async_op)

    def report(self) -> str:
        """Return how the ranks reach each other's GPUs, or that no call was made there yet."""
        return "no call on a GPU yet" if self.group is None else self.group.report()

    def stop(self) -> None:
        if self.group is not None:
            self.group.stop()

    def close(self) -> None:
        if self.group is not None:
            self._host.use_gpu(None)
            self.group.close()
