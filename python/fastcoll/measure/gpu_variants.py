# SPDX-License-Identifier: Apache-2.0
"""One rank's end of `fastcoll tune --device cuda`: one algorithm after the other.

Decides how each is timed. Algorithms that run in kernels alone are timed in captured graphs, where
the time is the GPU's. NCCL is timed eagerly: its calls meet on the CPUs first, which no replay
would show. Knows nothing of tables.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fastcoll import env
from fastcoll.choose.table import NCCL_MOVES
from fastcoll.measure.gpu_libraries import FastcollOnGpu, InGraph
from fastcoll.measure.gpu_ranks import GpuRank, capture
from fastcoll.measure.library import Bound, Library, WorkerConfig
from fastcoll.measure.pattern import Cell
from fastcoll.native import _C
from fastcoll.types import Request

if TYPE_CHECKING:
    from fastcoll.gpu.group import DeviceGroup

Json = dict[str, Any]


def request_on_gpus(cell: Cell, terms: Json, name: str = "auto") -> Request:
    """Return the request for a cell's call, by an algorithm's name in the tables."""
    moves = name == NCCL_MOVES
    return cell.request(
        algorithm="nccl" if moves else name,
        # Where any order will do, every algorithm is admitted, and NCCL adds by itself.
        numerics="same_bits" if moves else "fast",
        num_cpus=cell.world_size,
        **terms,
    )


class GpuVariants(InGraph, FastcollOnGpu):
    """fastcoll on GPUs, one algorithm after the other on the same tensors."""

    _name = "auto"
    _cell: Cell | None = None

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.comm.all_reduce(torch.zeros(1, device=self.device))

    @property
    def _group(self) -> "DeviceGroup":
        assert self.comm.device_group is not None  # since the ranks came up
        return self.comm.device_group

    def terms(self) -> Json:
        return self._group.terms.of_request()

    def prepare(self, cell: Cell) -> int | None:
        self._cell = cell
        num_wrong = super().prepare(cell)
        self._kept = {self._name: self._graphs}
        return num_wrong

    def choose(self, algorithm: str, segment_bytes: int) -> None:
        self._name = algorithm
        self.captures = not algorithm.startswith("nccl")
        if self._cell is not None:
            self._graphs = self._kept.setdefault(algorithm, {} if self.captures else None)
            self._call = self.bind(self._cell, self._output, self._input)

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        request = request_on_gpus(cell, self.terms(), self._name)
        plan = _C.Plan(*self.comm.planner.choose(request).plan.args())
        _, operands = self.checked(cell, output, source)
        run = partial(self._group.run, async_op=False)
        return run, ([(plan, operands, env.TIMEOUT_S.get())],)

    def release(self) -> None:
        self._cell = None
        self._kept = {}
        super().release()


class ThreadVariants(GpuVariants):
    """The same on a rank that is a thread of this process."""

    def __init__(self, me: GpuRank) -> None:
        told = WorkerConfig("fastcoll_gpu_variants", me.world_size, "", "", None, rank=me.rank)
        Library.__init__(self, told)  # the rank is there already
        self._me = me
        self.comm, self.device = me.comm, me.device

    def barrier(self) -> None:
        self.comm.barrier()

    def capture(
        self, run: Callable[[], None], stream: torch.cuda.Stream | None = None
    ) -> torch.cuda.CUDAGraph:
        return capture(replace(self._me, stream=stream or self._me.stream), run)


GPU_VARIANTS: dict[str, type[Library]] = {"fastcoll_gpu_variants": GpuVariants}
