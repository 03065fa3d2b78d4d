# SPDX-License-Identifier: Apache-2.0
# torch's stubs know several forms of each method; torch itself calls the one that is here.
# mypy: disable-error-code="override, assignment"
"""The backend "fastcoll" of torch.distributed, for CPU tensors.

Decides how torch's process-group interface becomes calls of a communicator. `import fastcoll`
registers it; then `init_process_group("fastcoll")` runs DDP, FSDP2 and DTensor. Must not know how a
call is carried out.

torch 2.13 renamed some methods; both names are here, as 2.11 knows the old ones only. Some methods
are called from C++ (DDP, functional collectives), the others by torch.distributed's functions.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastcoll import _C
from fastcoll.calls import Call
from fastcoll.communicator import Communicator
from fastcoll.errors import UnsupportedError
from fastcoll.groups import adopt
from fastcoll.parts import PartsCall
from fastcoll.transfers import TransferWork
from fastcoll.types import REDUCE_OPS, ReduceOp, Verb
from fastcoll.work import Work

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Sequence[torch.Tensor]]
NAME = "fastcoll"


class TorchWork(dist.Work):
    """A call of a communicator as torch sees it."""

    def __init__(self, works: Sequence[Work | TransferWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the calls are complete; raises what they raised. Of no time: no limit here."""
        for work in self._works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        """Do as `wait`: there are no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the calls are over."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether the calls are over and went well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        """Return what a call raised."""
        return next((error for work in self._works if (error := work.exception())), None)

    def result(self) -> list[torch.Tensor]:
        """Wait, then return the outputs."""
        return [output for work in self._works for output in work.result()]  # type: ignore[misc]

    def source_rank(self) -> int:
        """Return the group rank that sent what was received here."""
        [work] = self._works
        return work.source_rank() if isinstance(work, TransferWork) else -1

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of outputs."""
        if len(self._works) == 1:
            return self._works[0].get_future()
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: [out for one in done.value() for out in one.value()])


def _limit_s(opts: Any) -> float | None:
    """Return the limit that a call was given, if any."""
    limit_s: float = opts.timeout.total_seconds() if opts is not None else 0
    return limit_s if limit_s > 0 else None


def _op(opts: Any) -> object:
    """Return what to reduce with; by the object that the C functions know, where there is one."""
    if opts is None:
        return ReduceOp.SUM
    op = opts.reduceOp.op
    return REDUCE_OPS[int(op)] if int(op) < len(REDUCE_OPS) else op


def _asks_for_work(opts: Any) -> bool:
    return opts is None or getattr(opts, "asyncOp", True)


def _one(tensors: Tensors) -> torch.Tensor:
    if len(tensors) != 1:
        raise UnsupportedError(f"a rank gives one tensor to a call, not {len(tensors)}")
    return tensors[0]


class FastcollProcessGroup(ProcessGroup):
    """A torch process group whose calls a communicator carries out."""

    def __init__(self, comm: Communicator, store: dist.Store) -> None:
        super().__init__(comm.rank, comm.world_size)  # type: ignore[call-arg]
        self.communicator = comm
        self._store = store
        self._name = comm.name
        self._desc = "undefined"
        self._default_limit_s: float | None = None
        self._coalescing: list[Work | TransferWork] | None = None
        self._sequence = 0

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
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> "FastcollProcessGroup":
        if torch.device(device).type != "cpu":
            raise UnsupportedError(f'the backend "{NAME}" works on CPU tensors, not on {device}')
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
        self._default_limit_s = timeout.total_seconds()

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

    def _asynchronous(self, opts: Any) -> bool:
        return self._coalescing is not None or _asks_for_work(opts)

    def _issue(self, calls: Iterable[Call | PartsCall], opts: Any) -> TorchWork | None:
        self._sequence += 1
        return self._wrap(self.communicator.issue_all(calls, self._asynchronous(opts)))

    def _wrap(self, work: Work | None) -> TorchWork | None:
        return None if work is None else self._track(work)

    def _track(self, work: Work | TransferWork) -> TorchWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return TorchWork([work])

    def _limit_of(self, opts: Any) -> float | None:
        return _limit_s(opts) or self._default_limit_s

    def _start_coalescing(self, device: torch.device) -> None:
        del device
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        """Return what covers everything since the start, whose own works torch drops."""
        del device
        works, self._coalescing = self._coalescing or [], None
        return TorchWork(works)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> TorchWork | None:
        """See `fastcoll.all_reduce`."""
        self._sequence += 1
        # The C function: a call that it knows needs no more Python.
        limit_s, asynchronous = self._limit_of(opts), self._asynchronous(opts)
        return self._wrap(
            _C.all_reduce(
                _one(tensors), _op(opts), self.communicator, asynchronous, timeout_s=limit_s
            )
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> TorchWork | None:
        """See `fastcoll.all_reduce_coalesced`."""
        self._sequence += 1
        limit_s, asynchronous = self._limit_of(opts), _asks_for_work(opts)
        return self._wrap(
            _C.all_reduce_coalesced(
                tensors, _op(opts), self.communicator, asynchronous, timeout_s=limit_s
            )
        )

    def broadcast(self, tensors: Tensors, opts: Any = None) -> TorchWork | None:
        """See `fastcoll.broadcast`."""
        tensor, root = _one(tensors), opts.rootRank if opts is not None else 0
        call = Call(
            verb=Verb.broadcast,
            input=tensor,
            output=tensor,
            root=root,
            timeout_s=self._limit_of(opts),
        )
        return self._issue([call], opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> TorchWork | None:
        """See `fastcoll.reduce`."""
        tensor, root = _one(tensors), opts.rootRank if opts is not None else 0
        call = Call(
            verb=Verb.reduce,
            input=tensor,
            output=tensor,
            op=_op(opts),
            root=root,
            timeout_s=self._limit_of(opts),
        )
        return self._issue([call], opts)

    def allgather(self, outputs: Lists, inputs: Tensors, opts: Any = None) -> TorchWork | None:
        """See `fastcoll.all_gather`."""
        return self.allgather_coalesced(outputs, [_one(inputs)], opts)

    def allgather_coalesced(
        self, outputs: Lists, inputs: Tensors, opts: Any = None
    ) -> TorchWork | None:
        """Gather each of several tensors into a list of its own."""
        limit_s = self._limit_of(opts)
        calls = (
            PartsCall(verb=Verb.all_gather, input=tensor, output=parts, timeout_s=limit_s)
            for parts, tensor in zip(outputs, inputs, strict=True)
        )
        return self._issue(calls, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> TorchWork | None:
        """See `fastcoll.all_gather_into_tensor`."""
        self._sequence += 1
        limit_s, asynchronous = self._limit_of(opts), self._asynchronous(opts)
        return self._wrap(
            _C.all_gather_into_tensor(
                output, input, self.communicator, asynchronous, timeout_s=limit_s
            )
        )

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> TorchWork | None:
        """See `fastcoll.all_gather_into_tensor_coalesced`."""
        self._sequence += 1
        limit_s, asynchronous = self._limit_of(opts), _asks_for_work(opts)
        return self._wrap(
            _C.all_gather_into_tensor_coalesced(
                outputs, inputs, self.communicator, asynchronous, timeout_s=limit_s
            )
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Lists, opts: Any = None) -> TorchWork | None:
        """See `fastcoll.reduce_scatter`."""
        self._sequence += 1
        [parts] = inputs
        work = self.communicator.reduce_scatter(
            _one(outputs),
            parts,
            _op(opts),
            self._asynchronous(opts),
            timeout_s=self._limit_of(opts),
        )
        return self._wrap(work)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> TorchWork | None:
        """See `fastcoll.reduce_scatter_tensor`."""
        self._sequence += 1
        limit_s, asynchronous = self._limit_of(opts), self._asynchronous(opts)
        return self._wrap(
            _C.reduce_scatter_tensor(
                output, input, _op(opts), self.communicator, asynchronous, timeout_s=limit_s
            )
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> TorchWork | None:
        """See `fastcoll.reduce_scatter_tensor_coalesced`."""
        self._sequence += 1
        limit_s, asynchronous = self._limit_of(opts), _asks_for_work(opts)
        return self._wrap(
            _C.reduce_scatter_tensor_coalesced(
                outputs, inputs, _op(opts), self.communicator, asynchronous, timeout_s=limit_s
            )
        )

    def gather(self, outputs: Lists, inputs: Tensors, opts: Any = None) -> TorchWork | None:
        """See `fastcoll.gather`."""
        call = PartsCall(
            verb=Verb.gather,
            input=_one(inputs),
            output=outputs[0] if outputs else None,
            root=opts.rootRank if opts is not None else 0,
            timeout_s=self._limit_of(opts),
        )
        return self._issue([call], opts)

    def scatter(self, outputs: Tensors, inputs: Lists, opts: Any = None) -> TorchWork | None:
        """See `fastcoll.scatter`."""
        call = PartsCall(
            verb=Verb.scatter,
            input=inputs[0] if inputs else None,
            output=_one(outputs),
            root=opts.rootRank if opts is not None else 0,
            timeout_s=self._limit_of(opts),
        )
        return self._issue([call], opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> TorchWork | None:
        """See `fastcoll.all_to_all_single`; torch gives an empty list for equal parts."""
        call = PartsCall(
            verb=Verb.all_to_all,
            input=input,
            output=output,
            input_splits=input_split_sizes or None,
            output_splits=output_split_sizes or None,
            timeout_s=self._limit_of(opts),
        )
        return self._issue([call], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork | None:
        """See `fastcoll.all_to_all`."""
        call = PartsCall(
            verb=Verb.all_to_all, input=inputs, output=outputs, timeout_s=self._limit_of(opts)
        )
        return self._issue([call], opts)

    def barrier(self, opts: Any = None) -> TorchWork | None:
        """See `fastcoll.barrier`."""
        return self._issue([Call(verb=Verb.barrier, timeout_s=self._limit_of(opts))], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See `fastcoll.monitored_barrier`."""
        limit_s = timeout.total_seconds() if timeout else self._default_limit_s
        self.communicator.monitored_barrier(limit_s, wait_all_ranks)

    # ---- point-to-point --------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> TorchWork:
        """See `fastcoll.isend`."""
        limit_s = self._default_limit_s
        return self._track(self.communicator.isend(_one(tensors), dst, tag, timeout_s=limit_s))

    def recv(self, tensors: Tensors, src: int, tag: int) -> TorchWork:
        """See `fastcoll.irecv`."""
        limit_s = self._default_limit_s
        return self._track(self.communicator.irecv(_one(tensors), src, tag, timeout_s=limit_s))

    def recv_anysource(self, tensors: Tensors, tag: int) -> TorchWork:
        """See `fastcoll.irecv`."""
        limit_s = self._default_limit_s
        return self._track(self.communicator.irecv(_one(tensors), None, tag, timeout_s=limit_s))

    # The names of torch 2.11.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _make(opts: Any, pg_options: object) -> FastcollProcessGroup:
    """Make the group that torch asks for; called on its members. Collective."""
    del pg_options
    comm = Communicator.from_store(
        opts.store,
        opts.group_rank,
        opts.group_size,
        timeout_s=opts.timeout.total_seconds(),
        name=opts.group_id,
    )
    group = FastcollProcessGroup(comm, opts.store)
    adopt(group, comm)
    return group


def register() -> None:
    """Make "fastcoll" a backend of torch.distributed; once is enough."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
        _admit_to_monitored_barrier()


def _admit_to_monitored_barrier() -> None:
    """Let dist.monitored_barrier take groups of this backend; torch refuses all but Gloo's."""
    torchs = dist.monitored_barrier

    @wraps(torchs)
    def monitored_barrier(
        group: ProcessGroup | None = None,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        ours = dist.group.WORLD if group is None else group
        if isinstance(ours, FastcollProcessGroup):
            ours.monitored_barrier(timeout, wait_all_ranks)
        else:
            torchs(group, timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier
