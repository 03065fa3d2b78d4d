# SPDX-License-Identifier: Apache-2.0
"""The interface of a measured library, and the parts that all share: buffers, check, loop.

Decides how buffers are made, filled and checked, for every library alike. Knows no library, no
window and nothing of the process that measures.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastcoll.measure.pattern import Cell, count_wrong, fill_input, neutral
from fastcoll.measure.timer import time_calls, time_calls_apart

IN_GRAPH = "_graph"  # behind a library's name: its calls in a captured graph, on GPUs
_POISON = 77
# A function and the arguments that make it one measured call.
Bound = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class WorkerConfig:
    """The settings of a rank process, from its command line."""

    library: str  # key of `libraries.LIBRARIES`
    world_size: int
    socket_path: str
    store_path: str  # file for the rendezvous of fastcoll and Gloo (unused by MPI)
    # The CPU that each rank stays on, or None to leave it to the scheduler.
    cpus: tuple[int, ...] | None
    symmetric: bool = False
    async_op: bool = False  # start every call asynchronously, and wait for it at once
    algorithm: str = "auto"
    numerics: str | None = None
    # Where the MPI's own mpi4py is, searched after this environment's folders.
    mpi4py_folder: str | None = None
    oneccl_shim: str | None = None  # the library that `oneccl.build` made
    rank: int = -1


class Library(ABC):
    """One rank's end of one library."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.rank = config.rank
        self.world_size = config.world_size
        self._input = self._output = torch.empty(0)
        self._call: Bound = (self.barrier, ())
        self._rewrite: Callable[[], None] | None = None

    @abstractmethod
    def version(self) -> str:
        """Return the library's version."""

    @abstractmethod
    def barrier(self) -> None:
        """Line up all ranks."""

    @abstractmethod
    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        """Return the function and arguments that run `cell` (in place: source is output)."""

    def asynchronous(self, call: Bound) -> Bound:
        """Return a call that starts `call` asynchronously and waits for it."""
        raise NotImplementedError(f"{self.config.library} has no asynchronous calls here")

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of one dimension in the memory this library is measured on."""
        return torch.empty(numel, dtype=dtype)

    def prepare(self, cell: Cell) -> int | None:
        """Allocate for `cell`, run it once and return the number of wrong elements.

        Returns:
            None for a barrier, which has no result.
        """
        if cell.verb == "barrier":
            self._call = self._bound(cell)
            self.loop(1)
            return None
        in_place = cell.verb in ("all_reduce", "reduce", "broadcast")
        self._output = self.allocate(cell.output_numel, cell.torch_dtype)
        self._input = (
            self._output if in_place else self.allocate(cell.input_numel, cell.torch_dtype)
        )
        self._output.fill_(1 if cell.dtype == "bool" else _POISON)
        if cell.verb != "broadcast" or self.rank == cell.root:
            fill_input(self._input, cell, self.rank)
        self._call = self._bound(cell)
        self._rewrite = None
        self.barrier()
        self.loop(1)
        num_wrong = count_wrong(self._output.cpu(), cell, self.rank)
        self._input.fill_(neutral(cell.op))
        self._output.fill_(neutral(cell.op))
        self._rewrite = self._rewriting(cell) if cell.is_rewritten else None
        self.barrier()
        return num_wrong

    def _rewriting(self, cell: Cell) -> Callable[[], None]:
        """Return what goes before each call of `cell`: new bytes in the input, and a barrier."""
        gives, source, value = cell.rewritten_bytes(self.rank), self._input, neutral(cell.op)

        def rewrite() -> None:
            if gives:
                source.fill_(value)
            self.barrier()

        return rewrite

    def _bound(self, cell: Cell) -> Bound:
        call = self.bind(cell, self._output, self._input)
        return self.asynchronous(call) if self.config.async_op else call

    def loop(self, iterations: int) -> float:
        """Return the seconds of `iterations` calls of the prepared cell.

        They are back to back, unless the cell's inputs are rewritten before each call.
        """
        fn, args = self._call
        if self._rewrite is None:
            return time_calls(fn, args, iterations)
        return time_calls_apart(fn, args, iterations, self._rewrite)

    def terms(self) -> dict[str, Any]:
        """Return the terms of the ranks that decide which calls they can make."""
        raise NotImplementedError(f"{self.config.library} has no terms")

    def choose(self, algorithm: str, segment_bytes: int) -> None:
        """Take this algorithm, in segments of this size, from now on."""
        raise NotImplementedError(f"{self.config.library} does not let one choose")

    def one_way_flag(self, iterations: int) -> float:
        """Return the seconds of one flag from rank 0 to rank 1, where the library can tell."""
        raise NotImplementedError(f"{self.config.library} has no flag to time")

    def release(self) -> None:
        """Free the buffers of `prepare`."""
        self._call, self._rewrite = (self.barrier, ()), None
        self._input = self._output = torch.empty(0)

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""
