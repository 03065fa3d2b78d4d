# SPDX-License-Identifier: Apache-2.0
# torch's stubs know several forms of each method; torch itself calls the one that is here.
# mypy: disable-error-code="override, assignment"
"""A torch process group whose calls a communicator carries out.

Decides how torch's process-group interface becomes calls of a communicator. It is a group by
itself where c10d_backend.cpp can't be compiled; where it can, it carries out what that leaves to
Python. Must not know how a call is carried out.

torch 2.13 renamed some methods; both names are here, as 2.11 knows the old ones only. Some methods
are called from C++ (DDP, functional collectives), the others by torch.distributed's functions.
Users call them too, in torch's short forms: see torch_arguments.py.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import ProcessGroup

from fastcoll.api.reductions import reduce_scatter
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.parts import PartsCall
from fastcoll.calls.transfer_work import TransferWork
from fastcoll.calls.work import Work, completed
from fastcoll.errors import CollectiveTimeout, UnsupportedError, UsageError
from fastcoll.integrations.torch_arguments import (
    Lists,
    Tensors,
    one_of,
    op_of,
    options_of,
    parts_of,
    root_of,
)
from fastcoll.integrations.torch_sparse import sum_sparse
from fastcoll.integrations.torch_work import TorchWork
from fastcoll.native import _C
from fastcoll.types import Verb

NAME = "fastcoll"
_KEPT_BYTES = 64  # so that no tensor of size outlives its use


class FastcollProcessGroup(ProcessGroup):
    """A torch process group whose calls a communicator carries out."""

    def __init__(self, comm: BaseGroup, store: dist.Store) -> None:
        super().__init__(comm.rank, comm.world_size)  # type: ignore[call-arg]
        self.communicator = comm
        self._store = store
        self._name = comm.name
        self._desc = "undefined"
        self._coalescing: list[Work | TransferWork] | None = None
        self._sequence = 0
        # DDP's reducer waits for the flag that a rank of an uneven join sends, and holds the C++
        # half of its Work alone: without the Python half that would never return.
        self._kept: deque[TorchWork] = deque(maxlen=64)

    # ---- what torch asks a group -----------------------------------------------------------------

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.communicator.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self.communicator.world_size

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    getBackendName = name  # noqa: N815

    def get_group_store(self) -> dist.Store:
        """Return the store that the group was made with."""
        return self._store

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the group's name."""
        return self._name

    group_name = property(getGroupName)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the group's description."""
        return self._desc

    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> "FastcollProcessGroup":
        if torch.device(device) not in self._device_types:
            raise UnsupportedError(f'the backend "{NAME}" has nothing for {device}')
        return self

    @property
    def supports_splitting(self) -> bool:
        """False: `new_group` makes subgroups."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """True: see `_start_coalescing`."""
        return True

    def _set_sequence_number_for_group(self) -> None:
        pass  # a communicator counts its calls itself

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of calls that give none."""
        self.communicator.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group; queued calls are completed first."""
        self.communicator.close()

    def abort(self) -> None:
        """Give the group up: whoever waits in it, on any rank, raises AbortedError."""
        if not self.communicator.closed:
            self.communicator.abort("torch.distributed was told to abort the group")
            self.communicator.close()

    # ---- calls -----------------------------------------------------------------------------------

    def _begin(self, opts: Any) -> tuple[BaseGroup, bool, float | None]:
        """Count a call; return who carries it out, whether asynchronously, and its limit.

        The C function of its verb does: one whose plan is known needs no more Python than here.
        """
        self._sequence += 1
        if opts is None:
            return self.communicator, True, None
        asynchronous: bool = opts.asyncOp or self._coalescing is not None
        limit_s: float = opts.timeout.total_seconds()
        return self.communicator, asynchronous, limit_s if limit_s > 0 else None

    def _handle(self, work: Work | None) -> TorchWork | None:
        return None if work is None else self._track(work)

    def _track(self, work: Work | TransferWork) -> TorchWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        result = TorchWork([work])
        if isinstance(work, Work) and work.num_bytes() <= _KEPT_BYTES:
            self._kept.append(result)
        return result

    def _start_coalescing(self, device: torch.device) -> None:
        del device
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        """Return what covers everything since the start, whose own works torch drops."""
        del device
        works, self._coalescing = self._coalescing or [], None
        return TorchWork(works)

    def allreduce(
        self,
        tensors: Tensors | torch.Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: object = None,
    ) -> TorchWork | None:
        """See `fastcoll.all_reduce`. In short: tensor, op, timeout."""
        if type(opts) is not AllreduceOptions:
            opts = options_of(AllreduceOptions, timeout, reduceOp=op if opts is None else opts)
        tensor, op = one_of(tensors), op_of(opts)
        comm, asynchronous, limit_s = self._begin(opts)
        if tensor.is_sparse:
            sum_sparse(comm, tensor, op)
            return self._handle(completed([tensor])) if asynchronous else None
        return self._handle(_C.all_reduce(tensor, op, comm, asynchronous, timeout_s=limit_s))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> TorchWork | None:
        """See `fastcoll.all_reduce_coalesced`."""
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(
            _C.all_reduce_coalesced(tensors, op_of(opts), comm, asynchronous, timeout_s=limit_s)
        )

    def broadcast(
        self,
        tensors: Tensors | torch.Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork | None:
        """See `fastcoll.broadcast`. In short: tensor, root, timeout."""
        if type(opts) is not BroadcastOptions:
            opts = options_of(BroadcastOptions, timeout, rootRank=root if opts is None else opts)
        tensor = one_of(tensors)
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(
            _C.broadcast(tensor, root_of(opts), comm, asynchronous, timeout_s=limit_s)
        )

    def reduce(
        self,
        tensors: Tensors | torch.Tensor,
        opts: Any = None,
        op: object = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork | None:
        """See `fastcoll.reduce`. In short: tensor, root, op, timeout."""
        if type(opts) is not ReduceOptions:
            root = root if opts is None else opts
            opts = options_of(ReduceOptions, timeout, rootRank=root, reduceOp=op)
        tensor, root = one_of(tensors), root_of(opts)
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(
            _C.reduce(tensor, root, op_of(opts), comm, asynchronous, timeout_s=limit_s)
        )

    def allgather(
        self,
        outputs: Lists | Tensors,
        inputs: Tensors | torch.Tensor,
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> TorchWork | None:
        """See `fastcoll.all_gather`. In short: outputs, input, timeout."""
        if type(opts) is not AllgatherOptions:
            opts = options_of(AllgatherOptions, timeout if opts is None else opts)
        parts = parts_of(outputs) or ()
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(
            _C.all_gather(parts, one_of(inputs), comm, asynchronous, timeout_s=limit_s)
        )

    def allgather_coalesced(
        self, outputs: Lists, inputs: Tensors, opts: Any = None
    ) -> TorchWork | None:
        """Gather several tensors; `outputs` has a list for each rank, of what it gives."""
        if any(len(of_rank) != len(inputs) for of_rank in outputs):
            sizes = [len(of_rank) for of_rank in outputs]
            raise UsageError(f"{len(inputs)} tensors to gather, but lists for {sizes} of them")
        comm, asynchronous, limit_s = self._begin(opts)
        calls = (
            PartsCall(verb=Verb.all_gather, input=tensor, output=parts, timeout_s=limit_s)
            for *parts, tensor in zip(*outputs, inputs, strict=True)
        )
        return self._handle(comm.issue_all(calls, asynchronous))

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> TorchWork | None:
        """See `fastcoll.all_gather_into_tensor`."""
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(
            _C.all_gather_into_tensor(output, input, comm, asynchronous, timeout_s=limit_s)
        )

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> TorchWork | None:
        """See `fastcoll.all_gather_into_tensor_coalesced`."""
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(
            _C.all_gather_into_tensor_coalesced(
                outputs, inputs, comm, asynchronous, timeout_s=limit_s
            )
        )

    def reduce_scatter(
        self,
        outputs: Tensors | torch.Tensor,
        inputs: Lists | Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: object = None,
    ) -> TorchWork | None:
        """See `fastcoll.reduce_scatter`. In short: output, inputs, op, timeout."""
        if type(opts) is not ReduceScatterOptions:
            opts = options_of(ReduceScatterOptions, timeout, reduceOp=op if opts is None else opts)
        parts = parts_of(inputs) or ()
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(
            reduce_scatter(
                one_of(outputs), parts, op_of(opts), comm, asynchronous, timeout_s=limit_s
            )
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> TorchWork | None:
        """See `fastcoll.reduce_scatter_tensor`."""
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(
            _C.reduce_scatter_tensor(
                output, input, op_of(opts), comm, asynchronous, timeout_s=limit_s
            )
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> TorchWork | None:
        """See `fastcoll.reduce_scatter_tensor_coalesced`."""
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(
            _C.reduce_scatter_tensor_coalesced(
                outputs, inputs, op_of(opts), comm, asynchronous, timeout_s=limit_s
            )
        )

    def gather(
        self,
        outputs: Lists | Tensors,
        inputs: Tensors | torch.Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork | None:
        """See `fastcoll.gather`. In short: outputs, input, root, timeout."""
        if type(opts) is not GatherOptions:
            opts = options_of(GatherOptions, timeout, rootRank=root if opts is None else opts)
        parts = parts_of(outputs)
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(
            _C.gather(one_of(inputs), parts, root_of(opts), comm, asynchronous, timeout_s=limit_s)
        )

    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: GatherOptions | None = None
    ) -> TorchWork | None:
        """See `fastcoll.gather_single`."""
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(
            _C.gather_single(input, output, root_of(opts), comm, asynchronous, timeout_s=limit_s)
        )

    def scatter(
        self,
        outputs: Tensors | torch.Tensor,
        inputs: Lists | Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork | None:
        """See `fastcoll.scatter`. In short: output, inputs, root, timeout."""
        if type(opts) is not ScatterOptions:
            opts = options_of(ScatterOptions, timeout, rootRank=root if opts is None else opts)
        parts = parts_of(inputs)
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(
            _C.scatter(one_of(outputs), parts, root_of(opts), comm, asynchronous, timeout_s=limit_s)
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> TorchWork | None:
        """See `fastcoll.all_to_all_single`; torch gives an empty list for equal parts.

        In short: timeout for the options.
        """
        if type(opts) is not AllToAllOptions:
            opts = options_of(AllToAllOptions, timeout if opts is None else opts)
        splits = output_split_sizes or None, input_split_sizes or None
        comm, asynchronous, limit_s = self._begin(opts)
        work: Any = _C.all_to_all_single(  # the output is given, so it is not returned
            output, input, *splits, comm, asynchronous, timeout_s=limit_s
        )
        return self._handle(work)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork | None:
        """See `fastcoll.all_to_all`."""
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(_C.all_to_all(outputs, inputs, comm, asynchronous, timeout_s=limit_s))

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None) -> TorchWork | None:
        """See `fastcoll.barrier`. In short: timeout."""
        if type(opts) is not BarrierOptions:
            opts = options_of(BarrierOptions, timeout if opts is None else opts)
        comm, asynchronous, limit_s = self._begin(opts)
        return self._handle(_C.barrier(comm, asynchronous, timeout_s=limit_s))

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See `fastcoll.monitored_barrier`; the error starts with what Gloo says."""
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        me = self.rank()
        if timeout == 0:
            raise CollectiveTimeout(f"Rank {me} timed out in monitoredBarrier: its limit is 0 s")
        try:
            self.communicator.monitored_barrier(timeout, wait_all_ranks)
        except CollectiveTimeout as error:
            missing = error.ranks if wait_all_ranks else error.ranks[:1]
            names = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            said = f"{names} failed to pass monitoredBarrier"
            if me != 0:
                said = (
                    f"Rank {me} successfully reached monitoredBarrier, but received errors while "
                    f"waiting for send/recv from rank 0: {said}"
                )
            raise CollectiveTimeout(f"[Rank {me}]: {said}\n{error}", error.ranks) from None

    # ---- point-to-point --------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> TorchWork:
        """See `fastcoll.isend`."""
        return self._track(self.communicator.isend(one_of(tensors), dst, tag))

    def recv(self, tensors: Tensors, src: int, tag: int) -> TorchWork:
        """See `fastcoll.irecv`."""
        return self._track(self.communicator.irecv(one_of(tensors), src, tag))

    def recv_anysource(self, tensors: Tensors, tag: int) -> TorchWork:
        """See `fastcoll.irecv`."""
        return self._track(self.communicator.irecv(one_of(tensors), None, tag))

    # Older names.
    gather_into_tensor = gather_single
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
