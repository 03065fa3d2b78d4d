# SPDX-License-Identifier: Apache-2.0
# torch's stubs know several forms of each method; torch itself calls the one that is here.
# mypy: disable-error-code="override, assignment"
"""A torch process group whose calls a communicator carries out.

Decides how torch's process-group interface becomes calls of a communicator. It is a group by
itself where c10d_backend.cpp can't be compiled. Elsewhere it carries out the calls that
c10d_backend.cpp leaves to Python. Must not know how a call is carried out.

torch 2.13 renamed some methods: torch_names.py has the older names too. Some methods are called
from C++ (DDP, functional collectives), the others by torch.distributed's functions. Users call
them too, in torch's short forms: see torch_arguments.py.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
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

from fastcoll.api import lists, moves, reductions
from fastcoll.calls.limits import seconds
from fastcoll.calls.parts import PartsCall
from fastcoll.errors import CollectiveTimeout, PeerLostError, UsageError
from fastcoll.integrations.torch_arguments import (
    Limit,
    Lists,
    One,
    Tensors,
    one_of,
    op_of,
    options_of,
    parts_of,
    root_of,
)
from fastcoll.integrations.torch_base import BaseProcessGroup
from fastcoll.integrations.torch_names import TORCH_CALLS
from fastcoll.integrations.torch_sparse import sum_sparse
from fastcoll.integrations.torch_work import TorchWork
from fastcoll.types import Verb


class FastcollProcessGroup(BaseProcessGroup):
    """A torch process group whose calls a communicator carries out."""

    def allreduce(
        self, tensors: One, opts: Any = None, timeout: Limit = None, *, op: object = None
    ) -> TorchWork | None:
        """See `fastcoll.all_reduce`. In short: tensor, op, timeout."""
        if type(opts) is not AllreduceOptions:
            opts = options_of(AllreduceOptions, timeout, reduceOp=op if opts is None else opts)
        tensor, op = one_of(tensors), op_of(opts)
        comm, is_async, limit_s = self._begin(opts)
        if tensor.is_sparse:
            return self._handle(sum_sparse(comm, tensor, op, is_async, limit_s))
        work = reductions.all_reduce(tensor, op, comm, is_async, timeout_s=limit_s)
        return self._handle(work)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> TorchWork | None:
        comm, is_async, limit_s = self._begin(opts)
        work = lists.all_reduce_coalesced(tensors, op_of(opts), comm, is_async, timeout_s=limit_s)
        return self._handle(work)

    def broadcast(
        self, tensors: One, opts: Any = None, timeout: Limit = None, *, root: int | None = None
    ) -> TorchWork | None:
        """See `fastcoll.broadcast`. In short: tensor, root, timeout."""
        if type(opts) is not BroadcastOptions:
            opts = options_of(BroadcastOptions, timeout, rootRank=root if opts is None else opts)
        tensor = one_of(tensors)
        comm, is_async, limit_s = self._begin(opts)
        work = moves.broadcast(tensor, root_of(opts), comm, is_async, timeout_s=limit_s)
        return self._handle(work)

    def reduce(
        self,
        tensors: One,
        opts: Any = None,
        op: object = None,
        timeout: Limit = None,
        *,
        root: int | None = None,
    ) -> TorchWork | None:
        """See `fastcoll.reduce`. In short: tensor, root, op, timeout."""
        if type(opts) is not ReduceOptions:
            root = root if opts is None else opts
            opts = options_of(ReduceOptions, timeout, rootRank=root, reduceOp=op)
        tensor, root = one_of(tensors), root_of(opts)
        comm, is_async, limit_s = self._begin(opts)
        work = reductions.reduce(tensor, root, op_of(opts), comm, is_async, timeout_s=limit_s)
        return self._handle(work)

    def allgather(
        self, outputs: Lists | Tensors, inputs: One, opts: Any = None, *, timeout: Limit = None
    ) -> TorchWork | None:
        """See `fastcoll.all_gather`. In short: outputs, input, timeout."""
        if type(opts) is not AllgatherOptions:
            opts = options_of(AllgatherOptions, timeout if opts is None else opts)
        parts = parts_of(outputs) or ()
        comm, is_async, limit_s = self._begin(opts)
        work = moves.all_gather(parts, one_of(inputs), comm, is_async, timeout_s=limit_s)
        return self._handle(work)

    def allgather_coalesced(
        self, outputs: Lists, inputs: Tensors, opts: Any = None
    ) -> TorchWork | None:
        """Gather several tensors; `outputs` has a list for each rank, for its tensors."""
        if any(len(of_rank) != len(inputs) for of_rank in outputs):
            sizes = [len(of_rank) for of_rank in outputs]
            raise UsageError(f"{len(inputs)} tensors to gather, but lists for {sizes} of them")
        comm, is_async, limit_s = self._begin(opts)
        calls = (
            PartsCall(verb=Verb.all_gather, input=tensor, output=parts, timeout_s=limit_s)
            for *parts, tensor in zip(*outputs, inputs, strict=True)
        )
        return self._handle(comm.issue_all(calls, is_async))

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> TorchWork | None:
        comm, is_async, limit_s = self._begin(opts)
        work = moves.all_gather_into_tensor(output, input, comm, is_async, timeout_s=limit_s)
        return self._handle(work)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> TorchWork | None:
        comm, is_async, limit_s = self._begin(opts)
        # The compiled backend makes the plain call of a list of one, and another rank may do so.
        if len(outputs) == len(inputs) == 1:
            work = moves.all_gather_into_tensor(
                outputs[0], inputs[0], comm, is_async, timeout_s=limit_s
            )
        else:
            work = lists.all_gather_into_tensor_coalesced(
                outputs, inputs, comm, is_async, timeout_s=limit_s
            )
        return self._handle(work)

    def reduce_scatter(
        self,
        outputs: One,
        inputs: Lists | Tensors,
        opts: Any = None,
        timeout: Limit = None,
        *,
        op: object = None,
    ) -> TorchWork | None:
        """See `fastcoll.reduce_scatter`. In short: output, inputs, op, timeout."""
        if type(opts) is not ReduceScatterOptions:
            opts = options_of(ReduceScatterOptions, timeout, reduceOp=op if opts is None else opts)
        parts = parts_of(inputs) or ()
        comm, is_async, limit_s = self._begin(opts)
        return self._handle(
            reductions.reduce_scatter(
                one_of(outputs), parts, op_of(opts), comm, is_async, timeout_s=limit_s
            )
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> TorchWork | None:
        comm, is_async, limit_s = self._begin(opts)
        return self._handle(
            reductions.reduce_scatter_tensor(
                output, input, op_of(opts), comm, is_async, timeout_s=limit_s
            )
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> TorchWork | None:
        comm, is_async, limit_s = self._begin(opts)
        # See all_gather_single_coalesced.
        if len(outputs) == len(inputs) == 1:
            work = reductions.reduce_scatter_tensor(
                outputs[0], inputs[0], op_of(opts), comm, is_async, timeout_s=limit_s
            )
        else:
            work = lists.reduce_scatter_tensor_coalesced(
                outputs, inputs, op_of(opts), comm, is_async, timeout_s=limit_s
            )
        return self._handle(work)

    def gather(
        self,
        outputs: Lists | Tensors,
        inputs: One,
        opts: Any = None,
        timeout: Limit = None,
        *,
        root: int | None = None,
    ) -> TorchWork | None:
        """See `fastcoll.gather`. In short: outputs, input, root, timeout."""
        if type(opts) is not GatherOptions:
            opts = options_of(GatherOptions, timeout, rootRank=root if opts is None else opts)
        parts = parts_of(outputs)
        comm, is_async, limit_s = self._begin(opts)
        work = moves.gather(one_of(inputs), parts, root_of(opts), comm, is_async, timeout_s=limit_s)
        return self._handle(work)

    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: GatherOptions | None = None
    ) -> TorchWork | None:
        comm, is_async, limit_s = self._begin(opts)
        work = moves.gather_single(input, output, root_of(opts), comm, is_async, timeout_s=limit_s)
        return self._handle(work)

    def scatter(
        self,
        outputs: One,
        inputs: Lists | Tensors,
        opts: Any = None,
        timeout: Limit = None,
        *,
        root: int | None = None,
    ) -> TorchWork | None:
        """See `fastcoll.scatter`. In short: output, inputs, root, timeout."""
        if type(opts) is not ScatterOptions:
            opts = options_of(ScatterOptions, timeout, rootRank=root if opts is None else opts)
        parts = parts_of(inputs)
        comm, is_async, limit_s = self._begin(opts)
        return self._handle(
            moves.scatter(one_of(outputs), parts, root_of(opts), comm, is_async, timeout_s=limit_s)
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        *,
        timeout: Limit = None,
    ) -> TorchWork | None:
        """See `fastcoll.all_to_all_single`; torch gives an empty list for equal parts.

        In short: timeout for the options.
        """
        if type(opts) is not AllToAllOptions:
            opts = options_of(AllToAllOptions, timeout if opts is None else opts)
        splits = output_split_sizes or None, input_split_sizes or None
        comm, is_async, limit_s = self._begin(opts)
        work: Any = moves.all_to_all_single(  # the output is given, so it is not returned
            output, input, *splits, comm, is_async, timeout_s=limit_s
        )
        return self._handle(work)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork | None:
        comm, is_async, limit_s = self._begin(opts)
        work = moves.all_to_all(outputs, inputs, comm, is_async, timeout_s=limit_s)
        return self._handle(work)

    def barrier(self, opts: Any = None, *, timeout: Limit = None) -> TorchWork | None:
        """See `fastcoll.barrier`. In short: timeout."""
        if type(opts) is not BarrierOptions:
            opts = options_of(BarrierOptions, timeout if opts is None else opts)
        comm, is_async, limit_s = self._begin(opts)
        return self._handle(moves.barrier(comm, is_async, timeout_s=limit_s))

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See `fastcoll.monitored_barrier`; the error starts with Gloo's text."""
        me = self.rank()
        limit_s = self.communicator.timeout_s if timeout is None else seconds(timeout)
        if limit_s == 0:
            raise CollectiveTimeout(f"Rank {me} timed out in monitoredBarrier after 0 ms.")
        try:
            self.communicator.monitored_barrier(timeout, wait_all_ranks)
        except (CollectiveTimeout, PeerLostError) as error:
            if not error.ranks:
                raise
            missing = error.ranks if wait_all_ranks else error.ranks[:1]
            names = f"Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, missing))}"
            said = f"{names} failed to pass monitoredBarrier in {limit_s * 1e3:.0f} ms"
            if me != 0:
                said = (
                    f"Rank {me} successfully reached monitoredBarrier, but received errors while "
                    f"waiting for send/recv from rank 0: {said}"
                )
            raise type(error)(f"[Rank {me}]: {said}\n{error}", error.ranks) from None

    # ---- point-to-point --------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> TorchWork:
        return self._track(self.communicator.isend(one_of(tensors), dst, tag))

    def recv(self, tensors: Tensors, src: int, tag: int) -> TorchWork:
        return self._track(self.communicator.irecv(one_of(tensors), src, tag))

    def recv_anysource(self, tensors: Tensors, tag: int) -> TorchWork:
        return self._track(self.communicator.irecv(one_of(tensors), None, tag))


for _call in TORCH_CALLS:
    for _older in _call.older:
        setattr(FastcollProcessGroup, _older, getattr(FastcollProcessGroup, _call.method))
