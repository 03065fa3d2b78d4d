# SPDX-License-Identifier: Apache-2.0
"""A group's side on GPUs: from a plan to a kernel in a stream.

Decides when a group sets up its GPUs, in which stream a call runs and when an error of the
device becomes the group's. Must not choose algorithms; must not know stores or process groups.
"""

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

import torch

from fastcoll import env
from fastcoll.calls.arrays import ArrayView, copy_back, dense_copy
from fastcoll.calls.foreign import on_producers_stream
from fastcoll.calls.limits import GROUP_LIMIT, GpuLimits
from fastcoll.calls.parts import PartsOperands
from fastcoll.calls.tensor_layout import learn_gpu_keys
from fastcoll.calls.tensors import Operands
from fastcoll.calls.transfers import ANY, Transfer, to_itself
from fastcoll.calls.work import Work
from fastcoll.errors import FastcollError, UnsupportedError, UsageError
from fastcoll.gpu.batches import pair_channels
from fastcoll.gpu.copies import CopyEngine
from fastcoll.gpu.heap import DeviceHeap
from fastcoll.gpu.host import DeviceHost, GpuLink, claim_blocks, hello_of
from fastcoll.gpu.journal import NOTHING, Journal, ToCome
from fastcoll.gpu.nccl import Nccl
from fastcoll.gpu.regions import Pin, map_regions
from fastcoll.gpu.streams import BlockStreams
from fastcoll.gpu.terms import DeviceHello, agree_terms
from fastcoll.gpu.verdicts import (
    DESYNC,
    PEER_LOST,
    TIMEOUT,
    Verdict,
    describe_transfer,
    explain,
    format_late,
    format_shared_blocks,
    nccl_is_late,
)
from fastcoll.gpu.watch import watcher
from fastcoll.gpu.work import DeviceTransferWork, DeviceWork, Started, beside
from fastcoll.memory.heap import SymmetricHeap
from fastcoll.memory.symmetric import tensor_on
from fastcoll.native import _C, _cuda
from fastcoll.text import say
from fastcoll.types import Algorithm

# A plan, its arguments, and the limit of its waits in seconds.
Start: TypeAlias = tuple[_C.Plan, Operands | PartsOperands, float]

_LOOK_S = 0.01  # between two looks at the peers' sockets: a system call for each peer
_GRACE_S = 0.1  # in which kernels end that have all they need of a peer that left


class DeviceGroup:
    """The GPU side of one group, on one device of this process. Making one is collective."""

    known: _C.GpuCalls | None = None  # the known calls, which C++ starts; None: Python starts all

    def __init__(
        self, host: DeviceHost, device: int, limits: GpuLimits, no_table: Callable[[], str]
    ) -> None:
        """Set up `device`; `no_table` returns why the tuning table can't be used for it."""
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
        self._stopped = False
        # Now, like all that calls need: later it could have to wait for kernels that run.
        self.side_stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        link = GpuLink(host)
        mine, capacity = hello_of(device, host.world_size, limits, no_table)
        hellos = [DeviceHello(**row) for row in link.gather(mine)]
        self.terms = agree_terms(hellos, _cuda.region_bytes)
        self._journal = Journal(host.rank, host.world_size, host.exchange_fds)
        self._next_look = 0.0
        self._claim = claim_blocks(hellos, self.terms, link, capacity)
        try:
            # Reasons: why earlier routes were not taken.
            self._regions, self._core, self.reasons = map_regions(hellos, self.terms, link)
            self._nccl = Nccl(host, device)
            if self._regions is None:
                self.terms = replace(self.terms, reaches_peers=False)
                self._nccl.connect(env.TIMEOUT_S.get())
        except BaseException:
            self._claim.release()
            raise
        if self._claim.begins_sharing:
            say(format_shared_blocks(host.name, device, self.terms.num_channels, capacity))
        self.route = "nccl"  # how the ranks reach each other's memory
        self._pin: Pin | None = Pin()
        if self._regions is not None:
            self.route = self._regions.route
            self.terms = replace(self.terms, no_multicast=self._regions.no_multicast)
            memory = DeviceHeap(self._regions, self._core, host.gather_words)
            sizes = self.terms.heap_bytes, self.terms.granularity
            self._heap = SymmetricHeap(memory, host.rank, host.world_size, *sizes)
            self._copies = CopyEngine(device, host.rank, memory.bases, self._core, self._heap)
        self._limits = limits
        if self._regions is not None and learn_gpu_keys(device):
            about = self._core.side(), device, self._journal.core, limits.timeout_s
            self.known = _C.GpuCalls(*about, self.side_stream, self.terms.num_channels)
        self._streams = BlockStreams(self.known)
        self._told: dict[int, int] = {}  # the late ranks that were logged, and their calls
        self._core.report_after(limits.report_s)
        watcher.add(self)

    @property
    def core(self) -> _cuda.Group:
        """The extension's group, which starts kernels. For measurements, which start their own."""
        return self._core

    # ---- calls -----------------------------------------------------------------------------------

    def run(self, starts: Sequence[Start], *, async_op: bool) -> Work | None:
        """Start calls in the current stream, or beside it if they are asynchronous."""
        self._check(range(self._host.world_size), ToCome(len(starts)))

        def body(stream: torch.cuda.Stream) -> None:
            for plan, operands, limit_s in starts:
                self._start(plan, operands, limit_s, stream.cuda_stream)

        arrays = [array for _, operands, _ in starts for array in operands.views()]
        started = self._issue(body, arrays, async_op)
        if started is None:
            return None
        outputs = [array for _, operands, _ in starts for array in operands.outputs()]
        return DeviceWork(self, started, outputs)

    def _issue(
        self, body: Callable[[torch.cuda.Stream], None], arrays: Sequence[ArrayView], async_op: bool
    ) -> Started | None:
        """Start something in the arrays' stream, or beside it."""
        with on_producers_stream(arrays, self.device):
            stream = self.side_stream if async_op else torch.cuda.current_stream(self.device)
            for array in arrays:
                self._streams.use(array.ptr, stream)
            if async_op:
                return beside(self.side_stream, self.device, body, arrays)
            body(stream)
            return None

    def _start(
        self, plan: _C.Plan, operands: Operands | PartsOperands, limit_s: float, stream: int
    ) -> None:
        self._journal.core.write(plan, self._site())
        flat = operands.flat(takes_apart=_C.takes_parts_apart(plan.algorithm))
        if plan.algorithm == Algorithm.nccl:
            if self.known is not None:
                self.known.pause(True)
            self._nccl.run(plan, flat, stream, limit_s)
        elif plan.algorithm == Algorithm.copy_engine:
            self._copies.run(plan, flat, limit_s)
        else:
            where = flat.input_ptr, flat.output_ptr, stream
            self._core.launch(plan, *where, limit_s, flat.counts, None, *flat.parts)
        flat.finish()

    def _site(self) -> str:
        return _C.find_call_site() if self._host.traces else ""

    def transfer(
        self, transfers: Sequence[Transfer], limit_s: float, *, async_op: bool
    ) -> list[DeviceTransferWork]:
        """Start sends and receives in the current stream, or beside it.

        Args:
            limit_s: Of those that have none of their own.

        Raises:
            UnsupportedError: One receives from any rank, or the group has too few thread blocks.
            UsageError: A transfer to this rank itself has no other side here.
        """
        if any(one.peer == ANY for one in transfers):
            raise UnsupportedError(
                "a receive from any rank can't be had on GPUs, whose kernels wait for one peer: "
                "name src"
            )
        host, channels = self._host, self.terms.num_channels
        own = to_itself([one for one in transfers if one.peer == host.rank])
        others = [one for one in transfers if one.peer != host.rank]
        most = pair_channels(channels, _cuda.K_PAIR_CHANNELS)
        pairs = [(one.sends, one.peer) for one in others]
        self._check([one.peer for one in others], ToCome(messages=pairs))
        batches = _C.transfer_kernels(pairs, host.rank, host.world_size, channels, most)

        def body(stream: torch.cuda.Stream) -> None:
            for source, target in own:
                target.copy_(source.reshape(target.shape))
            for batch in batches:
                mine = [others[index] for index in batch]
                self._start_transfers(mine, most, stream.cuda_stream, limit_s)

        started = self._issue(body, [one.array for one in transfers], async_op)
        if started is None:
            return []
        return [DeviceTransferWork(self, started, one) for one in transfers]

    def _start_transfers(
        self, transfers: Sequence[Transfer], most: int, stream: int, limit_s: float
    ) -> None:
        dense: list[ArrayView] = []
        rows = []
        for one in transfers:
            array = one.array if one.array.dense else dense_copy(one.array, fill=one.sends)
            dense.append(array)
            facts = array.numel, int(array.dtype), one.peer, one.tag
            self._journal.core.write_message(one.sends, *facts, self._site())
            rows.append((one.sends, array.ptr, *facts))
        own_limits = [one.limit_s for one in transfers if one.limit_s != GROUP_LIMIT]
        limit_s = max(own_limits, default=limit_s)
        if self.terms.reaches_peers:
            self._core.transfer(rows, most, stream, limit_s)
        else:
            self._nccl.transfer(rows, limit_s)
        self._journal.core.note_started(", ".join(map(describe_transfer, transfers)))
        for one, array in zip(transfers, dense, strict=True):
            if not one.sends and array is not one.array:
                copy_back(one.array, array)

    def check(self) -> None:
        """Raise the error that broke the group, if one has; does not wait for the device."""
        self._check(range(self._host.world_size))

    def _check_kernels(self) -> None:
        """Raise the error that a kernel, or the group's CPU side, has found."""
        words = self._core.verdict()
        if words is not None:
            self._fail(Verdict(*words))
        self._check_host()

    def _check(self, peers: Iterable[int], to_come: ToCome = NOTHING) -> None:
        self._check_kernels()
        self._look_for_lost(peers, to_come)
        if self._nccl.is_late():
            self._nccl.stop()
            last = self._journal.core.started()
            self._host.fail(TIMEOUT, nccl_is_late(self._host.name, last), ())
        if self.known is not None and self.known.is_paused():
            self.known.pause(self._nccl.busy())

    def _check_host(self) -> None:
        """Raise the error that broke the group on its CPUs, if any; then no kernel waits on."""
        try:
            self._host.check_host()
        except FastcollError as error:
            self.stop(getattr(error, "ranks", ()))
            raise

    def look(self) -> None:
        """Look for a late, a lost and a failed rank; for the thread that watches.

        Raises:
            FastcollError: The error that broke the group.
        """
        self._report_late()
        self._check_kernels()
        with torch.cuda.device(self.device):  # or CUDA takes GPU 0 for this thread's
            self._look_for_lost(range(self._host.world_size))

    def _report_late(self) -> None:
        """Log the ranks for which kernels have waited long: once for each rank and call."""
        calls = dict(enumerate(self._core.late()))
        late = [rank for rank, call in calls.items() if call and call != self._told.get(rank)]
        if not late:
            return
        self._told |= {rank: calls[rank] for rank in late}
        last_calls = {rank: self._journal.last_call(rank) for rank in late}
        mine = self._journal.last_call(self._host.rank)
        say(format_late(self._where(), self._limits, last_calls, mine))

    def stop(self, culprits: Sequence[int] = ()) -> None:
        """Let this rank's kernels stop waiting: the group is broken, perhaps by these ranks."""
        me, world_size = self._host.rank, self._host.world_size
        if self._stopped or world_size == 1:
            return
        self._stopped = True
        self._core.give_up(next((one for one in culprits if one != me), (me + 1) % world_size))
        self._nccl.stop()

    def _look_for_lost(self, peers: Iterable[int], to_come: ToCome = NOTHING) -> None:
        """Raise PeerLostError if a rank is gone that something waits for, or would wait for."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        host, done = self._host, self._journal.has_ended_calls
        gone = [peer for peer in peers if peer != host.rank and host.peer_is_gone(peer)]
        # A root, say, may leave before another rank comes to its broadcast.
        gone = [peer for peer in gone if not done(peer, to_come)]
        if not gone or (to_come is NOTHING and not self._keeps_busy(_GRACE_S)):
            return
        self._core.give_up(gone[0])
        self._nccl.stop()
        self._fail(Verdict(PEER_LOST, gone[0], gone[0], 0, 0, 0, 0, 0))

    def _keeps_busy(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while self._core.busy() or self._nccl.busy():
            if time.monotonic() > end:
                return True
            time.sleep(_LOOK_S / 10)
        return False

    def _fail(self, verdict: Verdict) -> None:
        host, sides = self._host, (verdict.raiser, verdict.rank)
        gone = verdict.kind == PEER_LOST or host.peer_is_gone(verdict.rank)
        both = self._journal.difference(*sides) if verdict.kind == DESYNC else ""
        about = self._where(), self._journal.core.started()
        host.fail(*explain(verdict, *about, peer_is_gone=gone, both=both))

    def _where(self) -> str:
        host = self._host
        return f'in group "{host.name}" (seen by rank {host.rank} of {host.world_size})'

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make a symmetric tensor in this rank's heap. Collective.

        Raises:
            DriverError: A rank has no room for it.
            DesyncError: The ranks asked for different numbers of bytes.
            UsageError: The stream is being captured.
        """
        if not self.terms.reaches_peers:  # NCCL takes any memory
            return torch.empty(tuple(shape), dtype=dtype, device=f"cuda:{self.device}")
        if torch.cuda.is_current_stream_capturing():
            raise UsageError("a symmetric tensor can't be made in a capture: make it before")
        block = self._heap.allocate(prod(shape) * dtype.itemsize)
        tensor = tensor_on(block, shape, dtype, self._pin, self._heap.release, self.device)
        stream = torch.cuda.current_stream(self.device)
        others = self._streams.make(block.ptr, block.num_bytes, stream)
        for other in others:  # an earlier tensor's, whose work may still run
            stream.wait_stream(other)
        return tensor

    def report(self) -> str:
        """Return in one line how the ranks reach each other, for `fastcoll doctor`."""
        terms = self.terms
        whose = " shared with other groups" if terms.shares else ""
        text = f"{self.route}, {terms.num_channels} channels{whose}"
        text += f", {terms.ranks_per_gpu} ranks per GPU"
        chosen = f"no table: {terms.no_table}" if terms.no_table else "chosen by the table"
        refused = [f"not {route}: {reason}" for route, reason in self.reasons.items()]
        if terms.reaches_peers:
            without = terms.no_multicast
            refused.append(f"no multicast: {without}" if without else "multicast")
            refused.append(f"not nccl: {terms.no_nccl}" if terms.no_nccl else "nccl beside it")
        return "; ".join([text, chosen, *refused])

    def close(self) -> None:
        """Wait until this rank's kernels are over, then give its memory back.

        In a broken group they stop waiting for their peers.

        Graphs that captured calls of the group must not be replayed any more.
        """
        if os.getpid() != self._pid:
            return  # a forked child can't use its parent's GPU
        watcher.remove(self)
        try:
            with contextlib.suppress(FastcollError):
                self._check_host()  # or kernels would wait to their limit for a peer that is gone
            self._nccl.close()
            self._core.close()
            self._journal.core.finish()
        finally:
            self._claim.release()
            pin = weakref.ref(self._pin) if self._pin is not None else None
            self._journal.core.close()
            self._pin = None  # from here on only symmetric tensors keep this rank's region
            if self._regions is not None:
                self._regions.leave(pin)
