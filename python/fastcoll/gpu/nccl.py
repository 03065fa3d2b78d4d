# SPDX-License-Identifier: Apache-2.0
"""NCCL as a carrier between the GPUs of a group, through torch.distributed.

Decides the NCCL operations of a plan. Where NCCL may not add, it moves the parts and a kernel of
fastcoll adds them in rank order. The ranks' hosts compare their calls before every collective:
NCCL would run different calls as one, and wait for ever for a missing rank. Must not know when NCCL
is chosen.

A program waits for that meeting even with async_op=True, and a call that then runs too long is
ended. Sends and receives through NCCL are not compared, nor are their tags: NCCL knows no tags, and
gives each receive the next message of its peer.
"""

import contextlib
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.cuda import is_current_stream_capturing
from torch.distributed import FileStore, Store

from fastcoll.calls.tensors import Flat
from fastcoll.errors import UsageError
from fastcoll.gpu.verdicts import DESYNC
from fastcoll.memory.symmetric import bytes_at
from fastcoll.native import _C
from fastcoll.types import ITEMSIZE, REDUCTIONS, TORCH_DTYPES, DType, Op, ReduceOp, Verb, nccl_adds

if TYPE_CHECKING:
    from fastcoll.gpu.host import DeviceHost

_NO_LIMIT = timedelta(days=1)  # waits end here: NCCL's own watchdog would end the process
_PACK_BYTES = 16  # parts to be added start on one, so that a kernel reads whole packs
_POLL_S = 0.001
_GRACE_S = 1.0  # in which the last call ends when a rank has left: it did its part before


def make(store: Store, rank: int, world_size: int) -> Any:
    """Return a process group of NCCL's."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NO_LIMIT
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def add_parts(
    device: int, plan: _C.Plan, parts: list[int], target: int, numel: int, stream: int
) -> None:
    """Start the kernel that adds a part of each rank, all in this rank's own memory, in order."""
    from fastcoll.native import _cuda  # only now: a build without GPUs imports this file, too

    divisor = len(parts) if plan.op == Op.AVG else 0
    _cuda.add_partials(device, plan.dtype, plan.op, False, parts, target, numel, divisor, stream)


class Nccl:
    """The group's NCCL, made when it is first needed."""

    def __init__(self, host: "DeviceHost", device: int) -> None:
        self._host = host
        self._device = device
        self._group: Any = None
        self._fd = -1
        self._running: deque[tuple[Any, float]] = deque()  # works, and when they are late
        self._lock = threading.Lock()

    def connect(self, limit_s: float) -> None:
        """Make the process group and its connections. Collective.

        Raises:
            UsageError: The stream is being captured.
        """
        if is_current_stream_capturing():
            raise UsageError(
                "a group's first call through NCCL allocates memory, so it can't be captured: make "
                "one such call before the capture"
            )
        host = self._host
        # A store that no other process can reach, and of which nothing stays.
        fds = host.exchange_fds(os.memfd_create("fastcoll-nccl", os.MFD_CLOEXEC))
        for fd in fds[1:]:
            os.close(fd)
        self._fd = fds[0]
        store = FileStore(f"/proc/self/fd/{self._fd}", host.world_size)
        store.set_timeout(timedelta(seconds=limit_s))
        self._group = make(store, host.rank, host.world_size)
        # NCCL connects in its first call, which all ranks must make; a send is not all ranks'.
        self._wait(self._group.allreduce([self._empty(1).zero_()]), limit_s)

    # ---- calls -----------------------------------------------------------------------------------

    def run(self, plan: _C.Plan, flat: Flat, stream: int, limit_s: float) -> None:
        """Start a plan in the current stream, which is `stream`, once all ranks are here.

        Raises:
            DesyncError: The ranks call different things.
        """
        self._meet(plan, flat.counts)
        if self._group is None:
            self.connect(limit_s)
        if plan.verb in REDUCTIONS:
            any_order = plan.fast_numerics
            adds = nccl_adds(DType(plan.dtype), Op(plan.op), any_order=any_order)
            (self._reduce if adds else self._move_and_add)(plan, flat, stream, limit_s)
        else:
            self._move(plan, flat, limit_s)

    def transfer(
        self, rows: Sequence[tuple[bool, int, int, int, int, int]], limit_s: float
    ) -> None:
        """Start sends and receives in the current stream: (sends, ptr, numel, dtype, peer, tag).

        Nothing is compared, as no two ranks meet here. NCCL knows no tags, and gives each receive
        the next message of its peer.
        """
        group = self._group
        group._start_coalescing()  # as one: or two ranks that both send first wait for ever
        for sends, ptr, numel, dtype, peer, tag in rows:
            tensor = self._bytes(ptr, numel * ITEMSIZE[DType(dtype)])
            if numel:
                (group.send if sends else group.recv)([tensor], peer, tag)
        work = group._end_coalescing()
        if work is not None:  # it had something to carry
            self._wait(work, limit_s)

    def _meet(self, plan: _C.Plan, counts: Sequence[int]) -> None:
        """Wait until all ranks are in this call, and see that it is the same.

        The program waits, with `async_op=True` too. A call that NCCL has can't be taken back, so no
        rank may begin before all have compared.
        """
        host, world = self._host, self._host.world_size
        text = repr(plan)
        words = list(counts) or [0] * (2 * world)
        rows = host.gather_words([zlib.crc32(text.encode()), *words])
        odd = [rank for rank, row in enumerate(rows) if row[0] != rows[0][0]]
        if odd:
            texts = [raw.decode() for raw in host.gather_bytes(text.encode())]
            sides = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(texts))
            host.fail(DESYNC, f"the ranks make different calls through NCCL: {sides}", odd)
        for sender, row in enumerate(rows):
            for receiver, given in enumerate(row[1 : 1 + world]):
                if given != (taken := rows[receiver][1 + world + sender]):
                    what = f"rank {sender} sends rank {receiver} {given} elements, which takes"
                    host.fail(DESYNC, f"{text} through NCCL: {what} {taken}", [sender, receiver])

    def _move(self, plan: _C.Plan, flat: Flat, limit_s: float) -> None:
        world, me, group = self._host.world_size, self._host.rank, self._group
        itemsize = ITEMSIZE[DType(plan.dtype)]
        sizes = [count * itemsize for count in flat.counts or [plan.numel] * 2 * world]
        gives, gets = sizes[:world], sizes[world:]
        if plan.verb == Verb.broadcast:
            options = dist.BroadcastOptions()
            options.rootRank = plan.root
            whole = self._bytes(flat.input_ptr, gives[0])
            return self._wait(group.broadcast([whole], options), limit_s)
        if plan.verb == Verb.all_gather:
            given = self._bytes(flat.input_ptr, gives[me])
            return self._gather(self._bytes(flat.output_ptr, sum(gets)), given, gets, limit_s)
        if plan.verb == Verb.gather:
            gives = [gives[0] if rank == plan.root else 0 for rank in range(world)]
            gets = gets if me == plan.root else [0] * world
        elif plan.verb == Verb.scatter:
            gives = gives if me == plan.root else [0] * world
            gets = [gets[0] if rank == plan.root else 0 for rank in range(world)]
        source = self._bytes(flat.input_ptr, sum(gives))
        target = self._bytes(flat.output_ptr, sum(gets))
        return self._wait(group.alltoall_base(target, source, gets, gives), limit_s)

    def _gather(
        self, output: torch.Tensor, given: torch.Tensor, sizes: Sequence[int], limit_s: float
    ) -> None:
        """Give every rank's bytes, of these sizes, to all ranks."""
        if len(set(sizes)) == 1:
            return self._wait(self._group._allgather_base(output, given), limit_s)
        for rank, part in enumerate(torch.split(output, list(sizes))):
            if rank == self._host.rank and part.data_ptr() != given.data_ptr():
                part.copy_(given)
            options = dist.BroadcastOptions()
            options.rootRank = rank
            if len(part):
                self._wait(self._group.broadcast([part], options), limit_s)
        return None

    def _reduce(self, plan: _C.Plan, flat: Flat, stream: int, limit_s: float) -> None:
        """Let NCCL add."""
        group, dtype = self._group, DType(plan.dtype)
        op = getattr(ReduceOp, Op(plan.op).name)
        size, world = plan.numel * ITEMSIZE[dtype], self._host.world_size
        kind = TORCH_DTYPES[dtype]
        if plan.verb == Verb.reduce_scatter:
            parts = self._bytes(flat.input_ptr, size * world).view(kind)
            output = self._bytes(flat.output_ptr, size).view(kind)
            options = dist.ReduceScatterOptions()
            options.reduceOp = op
            return self._wait(group._reduce_scatter_base(output, parts, options), limit_s)
        given = self._bytes(flat.input_ptr, size).view(kind)
        if plan.verb == Verb.all_reduce:
            output = self._bytes(flat.output_ptr, size).view(kind)
            if flat.output_ptr != flat.input_ptr:
                output.copy_(given)
            every = dist.AllreduceOptions()
            every.reduceOp = op
            return self._wait(group.allreduce([output], every), limit_s)
        to_root = dist.ReduceOptions()
        to_root.reduceOp, to_root.rootRank = op, plan.root
        sum_ = given.clone()  # ranks other than the root may get anything
        self._wait(group.reduce([sum_], to_root), limit_s)
        if self._host.rank == plan.root:
            self._bytes(flat.output_ptr, size).view(kind).copy_(sum_)
        return None

    def _move_and_add(self, plan: _C.Plan, flat: Flat, stream: int, limit_s: float) -> None:
        """Give every rank its part of all inputs, let it add them, and give the sums around."""
        world, me = self._host.world_size, self._host.rank
        itemsize = ITEMSIZE[DType(plan.dtype)]
        scatters = plan.verb == Verb.reduce_scatter
        size = plan.numel * itemsize
        part = size if scatters else -(-size // world)
        row = -(-part // _PACK_BYTES) * _PACK_BYTES
        given = self._bytes(flat.input_ptr, size * (world if scatters else 1))
        rows = self._rows(given, part if scatters else row, row)
        parts = torch.empty_like(rows)
        self._wait(self._group.alltoall_base(parts, rows, [], []), limit_s)
        if scatters:
            return self._add(plan, parts, flat.output_ptr, part, stream)
        output = self._bytes(flat.output_ptr, size)
        fits = size == world * row
        is_root = me == plan.root
        if plan.verb == Verb.all_reduce:
            whole = output if fits else self._empty(world * row)
            own = whole[me * row : (me + 1) * row]
        else:
            whole = (output if fits else self._empty(world * row)) if is_root else output[:0]
            own = self._empty(row)
        self._add(plan, parts, own.data_ptr(), row, stream)
        if plan.verb == Verb.all_reduce:
            self._wait(self._group._allgather_base(whole, own), limit_s)
        else:
            gives = [row if rank == plan.root else 0 for rank in range(world)]
            gets = [row if is_root else 0] * world
            self._wait(self._group.alltoall_base(whole, own, gets, gives), limit_s)
        if not fits and (is_root or plan.verb == Verb.all_reduce):
            output.copy_(whole[:size])
        return None

    def _rows(self, given: torch.Tensor, part: int, row: int) -> torch.Tensor:
        """Return parts, of which the last one may be short, with all of them `row` bytes long."""
        world = self._host.world_size
        if len(given) == world * row:
            return given
        rows = self._empty(world * row)
        for rank, some in enumerate(torch.split(given, part) if len(given) else ()):
            rows[rank * row : rank * row + len(some)] = some
        return rows

    def _add(
        self, plan: _C.Plan, parts: torch.Tensor, to: int, num_bytes: int, stream: int
    ) -> None:
        """Add the parts of all ranks, `num_bytes` of each row, in rank order."""
        numel = num_bytes // ITEMSIZE[DType(plan.dtype)]
        world = self._host.world_size
        rows = [row.data_ptr() for row in parts.view(world, len(parts) // world)]
        add_parts(self._device, plan, rows, to, numel, stream)

    def _bytes(self, ptr: int, num_bytes: int) -> torch.Tensor:
        return bytes_at(ptr, num_bytes, self._device)

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{self._device}")

    # ---- the end of a call -----------------------------------------------------------------------

    def _wait(self, work: Any, limit_s: float) -> None:
        """Let the current stream wait for a work of NCCL's."""
        work.wait()
        if not is_current_stream_capturing():
            self.busy()  # forget the calls that are over
            self._running.append((work, time.monotonic() + limit_s))

    def busy(self) -> bool:
        """Whether something that was started outside of a capture still runs.

        Nothing is found to be over while this thread captures: asking would invalidate the capture.
        """
        asks = not is_current_stream_capturing()
        with self._lock:  # the program and the thread that watches may ask at once
            while asks and self._running and self._running[0][0].is_completed():
                self._running.popleft()
            return bool(self._running)

    def is_late(self) -> bool:
        """Whether a call runs for longer than its limit, as far as can be asked now."""
        if not self._running or is_current_stream_capturing():
            return False
        return self.busy() and time.monotonic() > self._running[0][1]

    def stop(self) -> None:
        """End the running calls: the group is broken."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):  # the device itself may be broken
                self._group.abort()

    def close(self) -> None:
        """Wait for running calls, at most for their limit, and end NCCL here."""
        host = self._host
        gone_since = None
        while self.busy() and not self.is_late():
            if any(host.peer_is_gone(peer) for peer in range(host.world_size) if peer != host.rank):
                gone_since = gone_since or time.monotonic()
                if time.monotonic() > gone_since + _GRACE_S:
                    break
            time.sleep(_POLL_S)
        self.stop()
        self._group = None
        self._running.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
