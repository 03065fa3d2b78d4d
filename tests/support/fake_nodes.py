# SPDX-License-Identifier: Apache-2.0
"""GPUs made of the CPU in a group over several nodes: a node's as in fake_gpu.py, Gloo for NCCL.

A stream does not run by itself here. Data of a transfer arrives when a stream waits for it, not
before, and its source must not change until then. So a rank that reads without waiting, or writes
too early, has wrong bits.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fastcoll.gpu import nccl as device_nccl
from fastcoll.machine import gpu
from fastcoll.nodes import arrays
from fastcoll.nodes.arrays import finish, reduce_into, tensor_at
from fastcoll.nodes.gpus import captures
from fastcoll.nodes.gpus import group as node_gpus
from fastcoll.types import TORCH_DTYPES, DType, Op
from tests.support import fake_gpu

_POISON = 0xA5
SEGMENT_BYTES = 1 << 20
_MOST_PARTIALS = 2  # so that three nodes take more than one kernel


class LaneTransfer:
    """A collective of a lane: it starts when it is waited for; one of a stuck lane never ends."""

    def __init__(self, lane: "Lane", name: str, start: Callable[[], Any], given: Any) -> None:
        self._lane, self._log, self._name, self._start = lane, lane.transfers, name, start
        self._given, self._before = given, given.clone()
        self._is_over = False
        self._log.append(f"start {name}")

    def is_completed(self) -> bool:
        return self._is_over

    def wait(self) -> bool:
        if self._lane.is_stuck:
            return True  # as on a GPU: it is the stream that waits
        assert torch.equal(self._given, self._before), "a transfer's input was changed under way"
        work = self._start()
        while not work.is_completed():
            if self._lane.is_aborted:
                return True
            time.sleep(0.0005)
        work.wait()
        self._is_over = True
        self._log.append(f"wait {self._name}")
        return True


class Lane(fake_gpu.Gloo):
    """Replaces NCCL's process group of a lane.

    Attributes:
        transfers: The starts and waits, in order.
    """

    def __init__(self, store: Any, node: int, num_nodes: int, is_stuck: bool) -> None:
        super().__init__(store, node, num_nodes)
        self.transfers: list[str] = []
        self.is_stuck = is_stuck
        self.is_aborted = False
        self._is_connected = False

    def abort(self) -> None:
        self.transfers.append("abort")
        self.is_aborted = True
        # Gloo's own abort would wait for ever: the group stays until the process ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        def start() -> Any:
            return self._group.allreduce(tensors, options)

        if not self._is_connected:  # the host waits for this one
            self._is_connected = True
            return start()
        return LaneTransfer(self, "all_reduce", start, tensors[0])

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> LaneTransfer:
        def start() -> Any:
            return self._group.broadcast(tensors, options)

        return LaneTransfer(self, "broadcast", start, tensors[0])

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, *rest: Any) -> LaneTransfer:
        output.fill_(_POISON)
        return LaneTransfer(
            self,
            "all_to_all",
            lambda: self._group.alltoall_base(output, input, *rest),
            input,
        )

    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, options: Any
    ) -> LaneTransfer:
        output.fill_(_POISON)
        return LaneTransfer(
            self,
            "all_gather",
            lambda: self._group._allgather_base(output, input, options),
            input,
        )


def _add_partials(
    device: int,
    dtype: DType,
    op: Op,
    widened: bool,
    rows: Sequence[int],
    target: int,
    numel: int,
    divisor: int,
    stream: int,
) -> None:
    """Add partials as the kernel does (kernels/cuda/partials.cuh)."""
    assert (op is Op.AVG) == (divisor != 0), "only an average is divided"
    assert len(rows) <= _MOST_PARTIALS
    partial = DType.float32 if widened else dtype
    total = torch.empty(numel, dtype=TORCH_DTYPES[partial])
    reduce_into(total, [tensor_at(row, partial, numel) for row in rows], partial, op)
    finish(tensor_at(target, dtype, numel), total, dtype, op, divisor)


def facts(device: int) -> dict[str, str]:
    """Return a rank's description of its GPU."""
    return {"problem": "", "uuid": "its own", "nccl": "2.30.4, several ranks on one GPU"}


@contextlib.contextmanager
def fake_node_gpus(
    comm: Any, about: Callable[[int], dict[str, str]] = facts, *, is_stuck: bool = False
) -> Iterator[SimpleNamespace]:
    """Let CPU tensors pass for GPU tensors in this rank's process; `comm` is over nodes.

    Yields `lanes`, which the group's first call fills, `core` of the node, and `is_capturing`.
    """
    lanes: list[Lane] = []

    def make(*args: Any) -> Lane:
        lanes.append(Lane(*args, is_stuck))
        return lanes[-1]

    def tensor(address: int, num_bytes: int, device: int) -> torch.Tensor:
        return fake_gpu._bytes_at(address, num_bytes, device)

    state = SimpleNamespace(lanes=lanes, is_capturing=False)
    with fake_gpu.fake_gpu(comm._node_group) as core, contextlib.ExitStack() as patches:
        state.core = core
        for owner, name, value in (
            (device_nccl, "make", make),
            (arrays, "bytes_at", tensor),
            (node_gpus, "SEGMENT_BYTES", SEGMENT_BYTES),
            (node_gpus, "_facts", about),
            (node_gpus, "_place", lambda device: torch.device("cpu")),
            (gpu, "require", lambda: None),
            (captures, "is_capturing", lambda: state.is_capturing),
            (captures, "ignore_captures", lambda device: None),
            (captures, "enter_thread", lambda device: None),
            (node_gpus, "_most_partials", lambda: _MOST_PARTIALS),
            (node_gpus, "_add_partials", _add_partials),
            (torch.cuda, "Stream", fake_gpu._Stream),
            (torch.cuda, "Event", fake_gpu._Event),
            (torch.cuda, "current_stream", fake_gpu._Stream),
            (torch.cuda, "stream", contextlib.nullcontext),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        try:
            yield state
        finally:
            if comm._gpus is not None:
                comm._gpus.close()
                comm._gpus = None
