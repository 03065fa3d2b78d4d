# SPDX-License-Identifier: Apache-2.0
"""A GPU made of the CPU: the host side of GPU calls runs as it is, up to the launch of a kernel.

The rank's CPU group carries out the work of a kernel: its addresses, counts, and transfers that
share a kernel. So a wrong address, count or order shows as a wrong result or as a
rank that waits in vain. Gloo stands for NCCL.
"""

import contextlib
import ctypes
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fastcoll import _C
from fastcoll.api import VERBS
from fastcoll.calls import arrays as array
from fastcoll.calls import epilogues, foreign
from fastcoll.calls.limits import GpuLimits
from fastcoll.calls.methods import VerbMethods
from fastcoll.choose.algorithms.shared import SEGMENT_BYTES
from fastcoll.gpu import group as device_group
from fastcoll.gpu import nccl as device_nccl
from fastcoll.gpu import work as device_work
from fastcoll.gpu.group import DeviceGroup
from fastcoll.gpu.journal import Journal
from fastcoll.gpu.nccl import Nccl
from fastcoll.gpu.residency import Claim
from fastcoll.gpu.streams import BlockStreams
from fastcoll.gpu.terms import Terms
from fastcoll.group.communicator import Communicator
from fastcoll.nodes.arrays import finish, partial_dtype, reduce_into, tensor_at, widen
from fastcoll.types import ITEMSIZE, REDUCTIONS, TORCH_DTYPES, Algorithm, DType, Op, Verb

LIMIT_S = 20.0
P2P = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_real_view = array._view_tensor


class Core:
    """Replaces `_cuda.Group`: one rank's kernels.

    Attributes:
        log: The verb, inlining and counts of each launch; the number of transfers of each batch;
            "add" for each addition of parts that NCCL brought.
        parts: Of each launch, the numbers of parts that lie apart: of the input, of the output.
        algorithms: Of each launch; sums of the switch are made by two_shot here.
        shapes: Of each launch, where another one than the plan's was asked for.
        words: The answer of `verdict`.
        launched_in: The stream of each launch and batch.
        streams: All of them.
        running: Whether a kernel is said to run.
        late_calls: The answer of `late`.
        lost: The ranks that kernels were told not to wait for.
        closed: Whether the host waited for the kernels, and they ended.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.log: list[Any] = []
        self.parts: list[tuple[int, int]] = []
        self.algorithms: list[Algorithm] = []
        self.shapes: list[tuple[int, int, int] | None] = []
        self.launched_in: list[int] = []
        self.streams = Streams()
        self.words: tuple[int, ...] | None = None
        self.running = False
        self.late_calls = [0] * comm.world_size
        self.lost: list[int] = []
        self.closed = False

    def launch(
        self,
        plan: Any,
        source: int,
        target: int,
        stream: int,
        limit_s: float,
        counts: Sequence[int] = (),
        shape: tuple[int, int, int] | None = None,
        input_parts: Sequence[int] = (),
        output_parts: Sequence[int] = (),
    ) -> None:
        assert plan.channels > 0
        assert _C.takes_parts_apart(plan.algorithm) or not (input_parts or output_parts)
        self.parts.append((len(input_parts), len(output_parts)))
        self.shapes.append(shape)
        self.launched_in.append(stream)
        assert not (plan.inline and counts), "no LL kernel takes counts"
        self.log.append((Verb(plan.verb).name, plan.inline, list(counts)))
        self.algorithms.append(algorithm := Algorithm(plan.algorithm))
        reduces = Verb(plan.verb) in REDUCTIONS
        if algorithm is Algorithm.multimem:  # which CPUs have not
            algorithm = Algorithm.two_shot if reduces else Algorithm.direct
        fields = [plan.verb, plan.dtype, plan.op, algorithm, plan.numel, plan.root]
        cpu_plan = _C.Plan(*fields, SEGMENT_BYTES, plan.fast_numerics, False, plan.splits, 0)
        itemsize = ITEMSIZE[DType(plan.dtype)]
        verb, world, me = Verb(plan.verb), self.comm.world_size, self.comm.rank
        if verb not in (Verb.all_gather, Verb.all_to_all, Verb.gather, Verb.scatter):
            rows = [_bytes_at(part, plan.numel * itemsize, 0) for part in input_parts]
            joined = torch.cat(rows) if rows else None
            source = source if joined is None else joined.data_ptr()
            return self.comm.run(cpu_plan, source, target, LIMIT_S)
        numels = counts or [plan.numel] * 2 * world
        cut_in = verb in (Verb.all_to_all, Verb.scatter)
        cut_out = verb in (Verb.all_to_all, Verb.all_gather, Verb.gather)
        given = _parts(source, numels[:world], itemsize, cut_in, input_parts)
        taken = _parts(target, numels[world:], itemsize, cut_out, output_parts)
        gives = verb is not Verb.scatter or me == plan.root
        gets = verb is not Verb.gather or me == plan.root
        return self.comm.run_parts(cpu_plan, given if gives else [], taken if gets else [], LIMIT_S)

    def add(
        self, device: int, plan: Any, parts: list[int], target: int, numel: int, stream: int
    ) -> None:
        """Replaces `gpu.nccl.add_parts`."""
        self.log.append("add")
        self.launched_in.append(stream)
        add_parts(device, plan, parts, target, numel, stream)

    def transfer(self, rows: list[Any], most: int, stream: int, limit_s: float) -> None:
        assert len({(row[0], row[4]) for row in rows}) == len(rows), "a pair twice in one kernel"
        self.log.append(len(rows))
        self.launched_in.append(stream)
        # One kernel: all of it goes on together, and the next one starts when it is over.
        posted = [
            _C.TransferWork(self.comm, sends, peer, tag, dtype, numel, ptr, LIMIT_S, None)
            for sends, ptr, numel, dtype, peer, tag in rows
        ]
        for one in posted:
            one.wait()

    def busy(self) -> bool:
        return self.running

    def late(self) -> list[int]:
        return self.late_calls

    def give_up(self, peer: int) -> None:
        self.lost.append(peer)

    def verdict(self) -> tuple[int, ...] | None:
        return self.words

    def close(self) -> None:
        assert self.lost or not self.running, "waits for a kernel that waits to its limit"
        self.closed = True


def add_parts(
    device: int, plan: Any, parts: list[int], target: int, numel: int, stream: int
) -> None:
    """Add the parts of all ranks, which start on packs, in rank order."""
    assert all(part % 16 == 0 for part in parts)
    dtype, op = DType(plan.dtype), Op(plan.op)
    kind = TORCH_DTYPES[partial_dtype(dtype, op)]
    rows = [torch.empty(numel, dtype=kind) for _ in parts]
    for row, part in zip(rows, parts, strict=True):
        widen(row, tensor_at(part, dtype, numel), dtype)
    total = torch.empty(numel, dtype=kind)
    reduce_into(total, rows, partial_dtype(dtype, op), op)
    finish(tensor_at(target, dtype, numel), total, dtype, op, len(parts))


class Gloo:
    """Replaces NCCL's process group by Gloo's, whose sends and receives here go as one, too.

    Attributes:
        log: The names of the functions called.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=LIMIT_S))
        self._started: list[Any] = []
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.log.append(name)
        return getattr(self._group, name)

    def _start_coalescing(self) -> None:
        self._started = []

    def send(self, *args: Any) -> None:
        self._started.append(self._group.send(*args))

    def recv(self, *args: Any) -> None:
        self._started.append(self._group.recv(*args))

    def _end_coalescing(self) -> Any:
        started = self._started
        if not started:  # as NCCL's
            return None
        return SimpleNamespace(
            wait=lambda: [work.wait() for work in started],
            is_completed=lambda: all(work.is_completed() for work in started),
        )


def _bytes_at(ptr: int, num_bytes: int, device: int) -> torch.Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_char * num_bytes).from_address(ptr)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _parts(
    ptr: int, numels: Sequence[int], itemsize: int, cut: bool, apart: Sequence[int]
) -> list[tuple[int, int]]:
    if apart:
        assert cut, "a side with one part"
        return [(at, numel * itemsize) for at, numel in zip(apart, numels, strict=True)]
    starts = accumulate(numels, initial=0) if cut else [0] * len(numels)
    pairs = zip(starts, numels, strict=False)
    return [(ptr + start * itemsize, numel * itemsize) for start, numel in pairs]


class _Stream:
    def __init__(self, cuda_stream: int = 0, *_: Any, **__: Any) -> None:
        self.cuda_stream = cuda_stream
        self.waited: list[int] = []

    def wait_stream(self, other: "_Stream") -> None:
        self.waited.append(other.cuda_stream)

    def wait_event(self, event: Any) -> None:
        self.waited.append(-1)


class _Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True


class Streams:
    """Replaces torch's streams: they only log which one waits for which (-1: for an event).

    Attributes:
        entered: The streams that were current when a device was entered.
        captured: Whether streams are said to be captured.
    """

    Stream = _Stream
    Event = _Event

    def __init__(self) -> None:
        self.made = {0: _Stream()}
        self._current = self.made[0]
        self.entered: list[_Stream] = []
        self.captured = False

    def device(self, index: int) -> Any:
        self.entered.append(self._current)
        return contextlib.nullcontext()

    def is_current_stream_capturing(self) -> bool:
        return self.captured

    def current_stream(self, device: int | None = None) -> _Stream:
        return self._current

    def default_stream(self, device: int) -> _Stream:
        return self.made[0]

    def ExternalStream(self, pointer: int, device: int) -> _Stream:  # noqa: N802
        return self.made.setdefault(pointer, _Stream(pointer))

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        kept, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = kept


def _view_on_gpu(tensor: torch.Tensor, name: str, gpu: bool) -> array.ArrayView:
    found = _real_view(tensor, name, gpu)
    return dataclasses.replace(found, device=0) if gpu else found


def _by_python(verb: str) -> Callable[..., Any]:
    """Return the method of a verb without C++."""
    parameters = inspect.signature(VERBS[verb]).parameters
    place = list(parameters).index("group")

    def call(comm: Any, *args: Any, **options: Any) -> Any:
        names = dict(zip([*parameters][:place] + [*parameters][place + 1 :], args, strict=False))
        return VERBS[verb](**names, **options, group=comm)

    return call


@contextlib.contextmanager
def fake_gpu(
    comm: Communicator,
    num_channels: int = 16,
    *,
    reaches_peers: bool = True,
    no_nccl: str = "not asked for",
    no_multicast: str = "not asked for",
) -> Iterator[Core]:
    """Let CPU tensors pass for GPU tensors in this rank's process, which must have one thread."""
    core = Core(comm)
    side = DeviceGroup.__new__(DeviceGroup)
    side.device, side._host, side._core = 0, comm, core  # type: ignore[assignment]
    terms = Terms(0, 0, num_channels, comm.world_size, (), no_nccl, reaches_peers)
    shares = 1 if not no_multicast else comm.world_size  # a switch adds over different GPUs
    side.terms = dataclasses.replace(terms, no_multicast=no_multicast, ranks_per_gpu=shares)
    side._nccl = Nccl(comm, 0)
    side.route, side.reasons = "vmm" if reaches_peers else "nccl", {}
    side._journal = Journal(comm.rank, comm.world_size, comm.exchange_fds)
    side._next_look, side._stopped, side._pid = 0.0, False, os.getpid()
    side._claim, side._pin = Claim(False, lambda: None), None
    side._streams = BlockStreams()
    side._limits, side._told = GpuLimits(600.0, 30.0), {}
    side._regions = SimpleNamespace(leave=lambda pin: None)  # type: ignore[assignment]
    side.side_stream = _Stream()  # type: ignore[assignment]
    streams = core.streams
    torch_like = SimpleNamespace(cuda=streams, Tensor=type(None))
    foreign_torch = SimpleNamespace(
        cuda=streams, Tensor=torch.Tensor, from_dlpack=torch.from_dlpack, as_tensor=torch.as_tensor
    )
    kept = device_group.torch, comm._gpus.group
    device_group.torch = device_work.torch = torch_like  # type: ignore[assignment]
    comm._gpus.group = side
    array._view_tensor = _view_on_gpu
    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(foreign, "torch", foreign_torch))
    steps_torch = SimpleNamespace(cuda=streams, Tensor=torch.Tensor, empty=torch.empty)
    patches.enter_context(mock.patch.object(epilogues, "torch", steps_torch))
    for place, value in {
        "add_parts": core.add,
        "bytes_at": _bytes_at,
        "make": Gloo,
        "is_current_stream_capturing": lambda: False,
    }.items():
        patches.enter_context(mock.patch.object(device_nccl, place, value))
    empty = mock.patch.object(Nccl, "_empty", lambda _, size: torch.empty(size, dtype=torch.uint8))
    patches.enter_context(empty)
    for name in P2P:  # C++ sees where the tensors really are
        patches.enter_context(mock.patch.object(VerbMethods, name, _by_python(name)))
    try:
        if not reaches_peers:
            side._nccl.connect(LIMIT_S)
        yield core
    finally:
        patches.close()
        array._view_tensor = _real_view
        device_work.torch = device_group.torch = kept[0]
        comm._gpus.group = kept[1]
        side._journal.core.finish()
        side._journal.core.close()
