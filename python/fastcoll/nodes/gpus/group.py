# SPDX-License-Identifier: Apache-2.0
"""A rank's GPU in a group over several nodes: kernels within the node, NCCL between nodes.

Decides when a group sets up its GPUs, in which stream a call runs, and how partial results are
added there. The phases are those of the CPUs, started in stream order: transfer k runs in NCCL's
stream while the node works on k + 1. Must not know how phases lay out data.

The group sets up its GPUs at its first call with one. All ranks gather their facts, and a lack on
any rank is an error on all. Each lane has a process group of NCCL. Its stream waits for the current
one when a transfer starts. The current one waits for it where the bytes are needed. Up to four
segments are in flight: while one crosses the network, the node reduces the next. Partial sums of
nodes arrive as bytes. Kernels of kernels/cuda/partials.cuh add them in the order of the nodes,
unless NCCL may reduce ("fast"). The host never waits, except for the split sizes of an all_to_all.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, Store

from fastcoll.bootstrap.deadline import Deadline
from fastcoll.calls.foreign import on_producers_stream
from fastcoll.calls.group import BaseGroup
from fastcoll.calls.group_calls import AnyCall, GpuCall
from fastcoll.calls.parts import PartsOperands
from fastcoll.calls.settings import Settings
from fastcoll.calls.tensors import Operands
from fastcoll.calls.work import Work
from fastcoll.errors import CollectiveTimeout, FastcollError, UnsupportedError, UsageError
from fastcoll.gpu.work import DeviceWork, beside
from fastcoll.machine import gpu
from fastcoll.nodes.arguments import Arguments, by_carrier, run_phases, wire_of
from fastcoll.nodes.arrays import copy
from fastcoll.nodes.carriers.nccl import nccl
from fastcoll.nodes.gpus import captures
from fastcoll.nodes.gpus.in_flight import CallInFlight, CallsInFlight
from fastcoll.nodes.lanes import Buffers, Lanes
from fastcoll.nodes.packets import Header, hand_over
from fastcoll.nodes.reductions import Reduction
from fastcoll.nodes.verdict.watch import Watch
from fastcoll.types import COUNTED, ITEMSIZE, TORCH_DTYPES, DType, Op, Wire

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_POLL_S = 0.001
# Of a message, over all lanes. The host starts a segment in a fraction of a millisecond. The links
# of a node carry as much in that time. Not measured.
SEGMENT_BYTES = 32 << 20


class NodeHost(Protocol):
    """The group that sets up its GPUs, as far as this has to know it."""

    @property
    def world_size(self) -> int: ...
    @property
    def name(self) -> str: ...
    def gather_bytes(self, data: bytes) -> list[bytes]: ...
    def gather_words(self, words: list[int], limit_s: float | None = None) -> list[list[int]]: ...
    def check(self) -> None: ...
    def in_turn(self, task: Callable[[int], None]) -> None: ...


@dataclass(frozen=True)
class Parts:
    """The parts of the group's CPU side that its GPU side uses."""

    host: NodeHost
    lanes: Lanes
    node_group: BaseGroup
    watch: Watch
    store: Store
    settings: Settings


@dataclass(frozen=True)
class GpuReduction(Reduction):
    """How to reduce on a GPU."""

    device: int

    def widen(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Reduction`; exact."""
        if target.dtype == source.dtype:
            copy(target, source)
        else:
            target.copy_(source)

    def reduce(self, target: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """See `Reduction`; as many at a time as a kernel takes."""
        divisor = self.world_size if self.op is Op.AVG else 0
        left = [row.view(TORCH_DTYPES[self.partial]) for row in rows]
        most = _most_partials()
        while len(left) > most:
            total = torch.empty_like(left[0])
            self._add(self.partial, left[:most], total, 0)
            left = [total, *left[most:]]
        self._add(self.dtype, left, target, divisor)

    def _add(
        self, dtype: DType, rows: Sequence[torch.Tensor], target: torch.Tensor, divisor: int
    ) -> None:
        op = Op.SUM if self.op is Op.AVG and divisor == 0 else self.op
        stream = torch.cuda.current_stream(self.device).cuda_stream
        addresses = [row.data_ptr() for row in rows]
        widened = rows[0].element_size() != ITEMSIZE[dtype]
        out = target.data_ptr(), target.numel()
        _add_partials(self.device, dtype, op, widened, addresses, *out, divisor, stream)


def _most_partials() -> int:
    from fastcoll.native import _cuda  # only now: without GPUs there may be no such extension

    return _cuda.K_MAX_PARTIALS


def _add_partials(*args: Any) -> None:
    from fastcoll.native import _cuda

    _cuda.add_partials(*args)


def _place(device: int) -> torch.device:
    return torch.device("cuda", device)


def _facts(device: int) -> dict[str, str]:
    """Return the facts about this rank's GPU that all ranks need."""
    try:
        gpu.require()
        return {"problem": "", "uuid": gpu.gpu(device).uuid, "nccl": gpu.nccl_name()}
    except FastcollError as error:
        return {"problem": str(error), "uuid": "", "nccl": ""}


class NodeGpus:
    """One rank's side on its GPU. Making one is collective."""

    def __init__(self, parts: Parts, device: int) -> None:
        """Come to a GPU.

        Raises:
            UnsupportedError: A rank has no GPU that can be used, or no NCCL that fits the others'.
            UsageError: The stream is being captured.
            CollectiveTimeout: NCCL does not connect.
        """
        if captures.is_capturing():
            raise UsageError(
                "a group's first call on GPUs makes connections, so it can't be captured: make one "
                "call before the capture"
            )
        self.device = device  # index of the GPU
        self._host, self._node_group, self._watch = parts.host, parts.node_group, parts.watch
        self._cpu_lanes, self._settings = parts.lanes, parts.settings
        node_map, cpu = parts.lanes.node_map, parts.lanes
        _require(self._exchange(_facts(device)), cpu)
        self._exchange({"problem": self._node_group_problem()})
        self._carriers = [
            nccl(PrefixStore(f"nccl{lane}", parts.store), cpu.node, node_map.num_nodes)
            for _, lane in cpu.lanes()
        ]
        self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._in_flight = CallsInFlight(
            parts.watch,
            self._carriers,
            captures.is_capturing,
            partial(captures.enter_thread, device),
        )
        self._lanes = Lanes(
            node_map,
            cpu.rank,
            parts.node_group,
            self._carriers,
            self._in_flight,
            Buffers(_place(device), SEGMENT_BYTES),
        )
        self._lock = threading.RLock()
        self._connect(parts.settings.timeout_s)

    def _exchange(self, facts: dict[str, str]) -> list[dict[str, str]]:
        """Gather facts from all ranks; return them by rank.

        Raises:
            UnsupportedError: A rank has a problem.
        """
        rows = [json.loads(row) for row in self._host.gather_bytes(json.dumps(facts).encode())]
        for rank, row in enumerate(rows):
            if row["problem"]:
                raise UnsupportedError(f"rank {rank} can't use its GPU: {row['problem']}")
        return rows

    def _node_group_problem(self) -> str:
        """Let the node set up its GPUs; return why it can't, or an empty string."""
        if self._cpu_lanes.num_local == 1:
            return ""
        try:
            self._node_group.empty(0, dtype=torch.uint8, device=_place(self.device))
        except FastcollError as error:
            return str(error)
        return ""

    def _connect(self, limit_s: float) -> None:
        """Let NCCL connect, which it does in its first call."""
        deadline = Deadline(limit_s)
        word = torch.zeros(1, dtype=torch.int32, device=_place(self.device))
        for carrier in self._carriers:
            started = carrier.all_reduce(word, Op.SUM)
            while not started.is_completed():
                if deadline.passed():
                    self._in_flight.stop()
                    raise CollectiveTimeout(
                        f'group "{self._host.name}": NCCL did not connect the nodes within '
                        f"{limit_s:g} s"
                    )
                time.sleep(_POLL_S)
            started.wait()

    def issue(self, calls: Sequence[GpuCall], async_op: bool) -> Work | None:
        """Start calls as one: in the current stream, or beside it if they are asynchronous."""
        for _, operands in calls:
            if (wire := wire_of(operands)) is not Wire.none:
                raise UnsupportedError(
                    f'wire="{wire.name}" codes elements on CPUs: pass .cpu(), or wire=None'
                )
            if operands.device != self.device:
                raise UsageError(
                    f'group "{self._host.name}" works on cuda:{self.device} here, not on '
                    f"cuda:{operands.device}: a rank has one GPU; make another group for "
                    "another one"
                )
            if operands.splits == COUNTED and captures.is_capturing():
                raise UsageError(
                    "the split sizes of an all_to_all over several nodes are exchanged by the "
                    "CPUs, so it can't be captured: give equal parts"
                )

        def body(stream: torch.cuda.Stream) -> None:
            for call, operands in calls:
                self._run(call, operands, stream)

        arrays = [array for _, operands in calls for array in operands.views()]
        with self._lock, on_producers_stream(arrays, self.device):
            self._host.check()
            if not async_op:
                body(torch.cuda.current_stream(self.device))
                return None
            started = beside(self._side, self.device, body, arrays)
        outputs = [array for _, operands in calls for array in operands.outputs()]
        return DeviceWork(self, started, outputs)

    def _run(
        self, call: AnyCall, operands: Operands | PartsOperands, stream: torch.cuda.Stream
    ) -> None:
        settings, world_size = self._settings, self._host.world_size
        limit_s = settings.gpu_limit_of(call.timeout_s)
        rounds = by_carrier(call, operands, settings, self._lanes, on_gpus=True)
        began = None
        if not captures.is_capturing():
            began = torch.cuda.Event()  # type: ignore[no-untyped-call]
            began.record(stream)
        in_flight = CallInFlight(call.verb.name, limit_s, began)
        what = operands.numel, operands.root, operands.splits
        header = Header(0, call.verb, operands.dtype, operands.op, *what, rounds, on_gpus=True)
        numerics = settings.numerics_of(call.numerics, on_gpus=True)
        how = GpuReduction(operands.dtype, operands.op, numerics, rounds, world_size, self.device)
        self._in_flight.begin(in_flight)
        self._host.in_turn(lambda sequence: self._send_header(in_flight, header, sequence))
        try:
            if operands.numel > 0 or operands.splits > 0:
                self._lanes.begin(limit_s)
                arguments = Arguments(operands, call.verb, world_size)
                gather = partial(self._host.gather_words, limit_s=limit_s)
                run_phases(self._lanes, header, arguments, how, gather)
                arguments.bring_back()
        except FastcollError as error:
            raise self._in_flight.fail(error) from error
        finally:
            in_flight.is_issued = True

    def _send_header(self, in_flight: CallInFlight, header: Header, sequence: int) -> None:
        """Start to send this call's header to the other nodes, without a wait for the answers."""
        header = header.numbered(sequence)
        in_flight.sequence = sequence
        lanes = self._cpu_lanes
        in_flight.packets = [hand_over(lanes, slot, header, _NOTHING) for slot, _ in lanes.lanes()]

    def check(self) -> None:
        """Raise the error that broke the group, if one has."""
        self._host.check()

    def check_node_group(self) -> None:
        """Raise the error that this node's kernels found; then it is the whole group's error."""
        try:
            self._node_group.check()
        except FastcollError as error:
            raise self._in_flight.fail(self._watch.of_node(error)) from error

    def stop(self) -> None:
        """End the transfers that run: the group is broken."""
        self._in_flight.stop()

    def close(self) -> None:
        """Wait until transfers are over or late, then end NCCL here."""
        self._in_flight.close()


def _require(rows: Sequence[dict[str, str]], lanes: Lanes) -> None:
    """Raise UnsupportedError, on all ranks alike, if NCCL can't carry between these GPUs."""
    node_map, most = lanes.node_map, 1
    for lane in range(node_map.num_lanes):
        uuids = [rows[rank]["uuid"] for rank in node_map.ranks_of(lane)]
        most = max(most, *map(uuids.count, uuids))
    if problem := gpu.nccl_problem([row["nccl"] for row in rows], most):
        raise UnsupportedError(
            f"between nodes NCCL carries tensors of GPUs, but {problem}. Pass .cpu(), or make a "
            "group of each node's ranks with new_group()"
        )
