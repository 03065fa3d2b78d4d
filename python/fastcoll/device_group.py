# SPDX-License-Identifier: Apache-2.0
"""A group's side on GPUs: from a plan to a kernel in a stream.

Decides when a group comes to its GPUs, in which stream a call runs and when an error of the
device becomes the group's. Must not choose algorithms; must not know stores or process groups.
"""

import json
import os
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from math import prod
from typing import Any, Protocol, TypeAlias

import torch

from fastcoll import _C, _cuda, env
from fastcoll.calls import Operands
from fastcoll.errors import CollectiveTimeout, FastcollError, UnsupportedError, UsageError
from fastcoll.memory.array import Array, copy_back
from fastcoll.memory.device import (
    DeviceHello,
    Facts,
    Pin,
    apologise,
    introduce,
    map_regions,
    settle,
)
from fastcoll.memory.heap import SymmetricHeap
from fastcoll.memory.symmetric import tensor_on
from fastcoll.reliability.residency import residency
from fastcoll.reliability.verdicts import Verdict, explain
from fastcoll.topology import gpu
from fastcoll.work import Work

# A plan, its arguments, and the limit of its waits in seconds.
Start: TypeAlias = tuple[_C.Plan, Operands, float]

_POLL_S = 0.0002


class DeviceHost(Protocol):
    """The group that comes to its GPUs, as far as its GPU side has to know it."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def socket_fds(self) -> list[int]: ...
    def gather_bytes(self, data: bytes) -> list[bytes]: ...
    def gather_words(self, words: list[int]) -> list[list[int]]: ...
    def exchange_fds(self, fd: int) -> list[int]: ...
    def check_host(self) -> None: ...
    def fail(self, kind: int, text: str, ranks: Sequence[int]) -> Any: ...
    def peer_is_gone(self, peer: int) -> bool: ...


class _Link:
    """The host, as the regions' module sees it."""

    def __init__(self, host: DeviceHost) -> None:
        self.rank = host.rank
        self.socket_fds = host.socket_fds
        self.exchange_fds = host.exchange_fds
        self._gather_bytes = host.gather_bytes

    def gather(self, facts: Facts) -> list[Facts]:
        return [json.loads(text) for text in self._gather_bytes(json.dumps(facts).encode())]


def _hello(device: int) -> tuple[Facts, int]:
    """Return this rank's introduction, and how many blocks its device holds."""
    try:
        gpu.require()
        facts = gpu.gpu(device)
        capacity = _cuda.load_kernels(device)
        free = residency.free(device, capacity)
        hello = introduce(
            device,
            facts.uuid,
            has_vmm=facts.has_vmm_fds,
            free_blocks=free,
            heap_bytes=env.GPU_HEAP_MIB.get() << 20,
            most_channels=env.GPU_CHANNELS.get(),
        )
    except FastcollError as error:
        return apologise(str(error)), 0
    return hello, capacity


class DeviceGroup:
    """The GPU side of one group, on one device of this process. Making one is collective.

    Attributes:
        device: Index of the device.
        terms: What the ranks agreed on.
        route: How they reach each other's memory.
        reasons: Why earlier routes were not taken.
    """

    def __init__(self, host: DeviceHost, device: int) -> None:
        if host.world_size > _cuda.K_MAX_WORLD:
            raise UnsupportedError(
                f"a group on GPUs has at most {_cuda.K_MAX_WORLD} ranks, not {host.world_size}"
            )
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "a group's first call on GPUs allocates memory, so it can't be captured: make one "
                "call before the capture"
            )
        self.device = device
        self._host = host
        self._pid = os.getpid()
        self._last_plan: _C.Plan | None = None
        self._side: torch.cuda.Stream | None = None
        link = _Link(host)
        mine, capacity = _hello(device)
        hellos = [DeviceHello(**row) for row in link.gather(mine)]
        self.terms = settle(hellos, _cuda.data_offset_bytes())
        self._claim = self.terms.num_channels * _share(hellos, host.rank)
        claimed = residency.claim(device, self._claim, capacity)
        try:
            rows = link.gather({"claimed": claimed})
            late = [rank for rank, row in enumerate(rows) if not row["claimed"]]
            if late:
                raise UnsupportedError(
                    f"another group took the thread blocks of the GPUs of ranks {late} meanwhile: "
                    "make groups one after another, or close one first"
                )
            self._regions, self._core, self.reasons = map_regions(hellos, self.terms, link)
        except BaseException:
            if claimed:
                residency.release(device, self._claim)
            raise
        self.route = self._regions.route
        self._pin: Pin | None = Pin()
        data_ptr = self._regions.ptrs[host.rank] + _cuda.data_offset_bytes()
        arena = (data_ptr, self.terms.data_bytes)
        self._heap = SymmetricHeap(_HeapHost(host), host.rank, host.world_size, arena)

    # ---- calls -----------------------------------------------------------------------------------

    def run(self, starts: Sequence[Start], *, async_op: bool) -> Work | None:
        """Start calls in the current stream, or beside it if they are asynchronous."""
        self.check()
        current = torch.cuda.current_stream(self.device)
        if not async_op:
            for start in starts:
                self._start(*start, current)
            return None
        if self._side is None:
            self._side = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        side = self._side
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for start in starts:
                self._start(*start, side)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(side)
        outputs: list[Array] = []
        for _, operands, _ in starts:
            outputs += operands.outputs()
            for operand in (operands.input, operands.output):
                if operand is not None and isinstance(operand.source, torch.Tensor):
                    operand.source.record_stream(side)  # its memory is not given away before
        return DeviceWork(self, event, outputs, side)

    def _start(
        self, plan: _C.Plan, operands: Operands, limit_s: float, stream: torch.cuda.Stream
    ) -> None:
        source, target = operands.dense()
        input_ptr, output_ptr = (0 if a is None else a.ptr for a in (source, target))
        self._core.launch(plan, input_ptr, output_ptr, stream.cuda_stream, limit_s)
        self._last_plan = plan
        if operands.output is not None and target is not None and target is not operands.output:
            copy_back(operands.output, target)

    def check(self) -> None:
        """Raise what broke the group, if anything has; does not wait for the device."""
        words = self._core.verdict()
        if words is None:
            self._host.check_host()
            return
        verdict = Verdict(*words)
        host = self._host
        where = f'in group "{host.name}" (rank {host.rank} of {host.world_size})'
        gone = host.peer_is_gone(verdict.rank)
        last_call = repr(self._last_plan)
        host.fail(*explain(verdict, host.rank, where, last_call, peer_is_gone=gone))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make a symmetric tensor in this rank's region. Collective.

        Raises:
            UsageError: The region has no room for it.
            DesyncError: The ranks asked for different numbers of bytes.
        """
        block = self._heap.allocate(prod(shape) * dtype.itemsize)
        return tensor_on(block, shape, dtype, self._pin, self._heap.release, self.device)

    def report(self) -> str:
        """Return in one line how the ranks reach each other, for `fastcoll doctor`."""
        terms = self.terms
        text = f"{self.route}, {terms.num_channels} channels, {terms.ranks_per_gpu} ranks per GPU"
        refused = [f"not {route}: {reason}" for route, reason in self.reasons.items()]
        return "; ".join([text, *refused])

    def close(self) -> None:
        """Wait until this rank's kernels are over, then give its memory back.

        Graphs that captured calls of the group must not be replayed any more.
        """
        if os.getpid() != self._pid:
            return  # a forked child can't use its parent's GPU
        try:
            self._core.close()
        finally:
            residency.release(self.device, self._claim)
            pin = weakref.ref(self._pin) if self._pin is not None else None
            self._pin = None  # from here on only symmetric tensors keep this rank's region
            self._regions.leave(pin)


class _HeapHost:
    """The host, as the heap of one arena sees it."""

    def __init__(self, host: DeviceHost) -> None:
        self.gather_words = host.gather_words

    def add_shared_arena(self, num_bytes: int) -> int:
        raise UsageError(
            f"no room for {num_bytes >> 20} MiB more of symmetric tensors on this group's GPUs: "
            "set FASTCOLL_GPU_HEAP_MIB higher before the group's first GPU call"
        )


def _share(hellos: Sequence[DeviceHello], rank: int) -> int:
    """Return for how many ranks this one claims: ranks of other processes claim nothing here."""
    me = hellos[rank]
    there = [hello for hello in hellos if hello.uuid == me.uuid]
    here = [hello for hello in there if hello.process == me.process]
    return -(-len(there) // len(here))


class DeviceWork(Work):
    """A call that was started on a GPU with `async_op=True`.

    As with torch's own GPU backends, `wait` makes the current stream wait, not the program.
    """

    def __init__(
        self,
        group: DeviceGroup,
        event: torch.cuda.Event,
        outputs: list[Array],
        stream: torch.cuda.Stream,
    ) -> None:
        super().__init__(lambda: None, outputs)
        self._group = group
        self._event = event
        self._stream = stream

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Let the current stream wait for the call.

        Args:
            timeout: Seconds for which the program itself waits; None or 0 do not wait.

        Returns:
            True.

        Raises:
            FastcollError: What broke the group, if that is known already.
            CollectiveTimeout: `timeout` ran out; the call goes on.
        """
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        end = time.monotonic() + (timeout or 0)
        while timeout and not self.is_completed():
            if time.monotonic() > end:
                raise CollectiveTimeout(f"the call is not complete after {timeout:g} s; it goes on")
            time.sleep(_POLL_S)
        torch.cuda.current_stream(self._group.device).wait_event(self._event)
        self._group.check()
        return True

    def is_completed(self) -> bool:
        """Return whether the call is over, well or not."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def is_success(self) -> bool:
        """Return whether the call is over and the group in order."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return what broke the group; None while the call runs or if it went well."""
        if not self.is_completed():
            return None
        try:
            self._group.check()
        except FastcollError as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of outputs; its callbacks run in streams that wait."""
        with self._lock:
            if self._future is None:
                device = torch.device("cuda", self._group.device)
                self._future = torch.futures.Future(devices=[device])
                with torch.cuda.stream(self._stream):
                    self._future.set_result(self._outputs)
            return self._future
