# SPDX-License-Identifier: Apache-2.0
"""all_reduce by the GPUs' copy engines.

Decides the order and the streams of copies, of the kernel that adds, and of the meetings of all
ranks. A meeting is the plan's own kernel: it waits for the same kernel on every rank, at most to
the limit. Must not know when this algorithm is chosen.

The message goes in waves. In each, every rank stages its input where all can read it. Meeting. The
copy streams fetch this rank's part of every rank's input. Behind them the main stream adds each
segment of that part in rank order. Meeting. The copy streams fetch the sums of all ranks.

A wave may overwrite the memory of the wave before. The staged input and the fetched parts of that
wave were read before its second meeting, its sums before the next wave's first meeting. At the end
all ranks meet once more, so that a failed call leaves NaN in its output, over all copied bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from fastcoll.calls.tensors import Flat
from fastcoll.errors import UsageError
from fastcoll.gpu.sums import Sums
from fastcoll.memory.heap import Block
from fastcoll.native import _C
from fastcoll.types import ITEMSIZE, DType

# Not measured. A wave is staged at once; less than a segment is not worth its launches.
WAVE_BYTES = 64 << 20
NUM_SEGMENTS = 8
LEAST_SEGMENT_BYTES = 256 << 10
NUM_STREAMS = 2  # copies of different peers side by side
_PACK_BYTES = 16
_Copy = tuple[int, int, int]  # to, from, bytes


class Core(Protocol):
    """The extension's functions that start kernels and copies."""

    def launch(
        self, plan: _C.Plan, source: int, target: int, stream: int, limit_s: float, /
    ) -> None: ...
    def copy(self, copies: list[_Copy], stream: int, /) -> None: ...


class Heap(Protocol):
    """The symmetric memory of the group."""

    def allocate(self, num_bytes: int, /) -> Block: ...


@dataclass(frozen=True)
class _Call:
    """One call: `main` is the stream it is made in."""

    plan: _C.Plan
    flat: Flat
    main: Any
    limit_s: float


def _packs(num_bytes: int) -> int:
    return -(-num_bytes // _PACK_BYTES) * _PACK_BYTES


class CopyEngine:
    """A group's calls by copy_engine; its memory and streams are taken at the first one."""

    def __init__(self, device: int, rank: int, ptrs: Sequence[int], core: Core, heap: Heap) -> None:
        """Make it on a rank's device; `ptrs` are all ranks' regions as mapped here."""
        self._device = device
        self._rank = rank
        self._ptrs = ptrs
        self._core = core
        self._heap = heap
        self._sums = Sums(device)
        self._streams: list[Any] = []
        self._place, self._most = -1, 0

    def _take_memory(self, main: Any) -> None:
        """Take memory for a wave. Collective.

        Raises:
            UsageError: The stream is being captured.
            DriverError: The heap has no room.
        """
        if _is_captured(main):
            raise UsageError(
                "a group's first call by copy_engine takes memory, so it can't be captured: make "
                "one such call before the capture"
            )
        if not self._streams:
            self._streams = [
                torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                for _ in range(NUM_STREAMS)
            ]
        # This rank's staged input, the parts that it fetched, its sums: rows of a wave's largest
        # part. They always have the same places, as each is free at another time.
        self._most = _packs(-(-WAVE_BYTES // len(self._ptrs)))
        block = self._heap.allocate((2 * len(self._ptrs) + 1) * self._most)
        self._place = block.ptr - self._ptrs[self._rank]

    def run(self, plan: _C.Plan, flat: Flat, limit_s: float) -> None:
        """Start an all_reduce in the current stream. Collective."""
        main = torch.cuda.current_stream(self._device)
        if self._place < 0:
            self._take_memory(main)
        self._sums.make_ready(plan, len(self._ptrs), captured=_is_captured(main))
        call = _Call(plan, flat, main, limit_s)
        num_bytes = plan.numel * ITEMSIZE[DType(plan.dtype)]
        self._join(main)  # behind earlier calls of any stream: these end in the same
        for start in range(0, num_bytes, WAVE_BYTES):
            self._start_wave(call, start, min(WAVE_BYTES, num_bytes - start))
        self._join(main)
        self._meet(call)

    def _start_wave(self, call: _Call, start: int, num_bytes: int) -> None:
        """Start the copies and kernels for `num_bytes` of the message."""
        main, world, me = call.main, len(self._ptrs), self._rank
        staged = [ptr + self._place for ptr in self._ptrs]
        brought = staged[me] + world * self._most
        sums = [base + 2 * world * self._most for base in staged]
        row = _packs(-(-num_bytes // world))
        begins = [min(rank * row, num_bytes) for rank in range(world + 1)]
        sizes = [end - begin for begin, end in pairwise(begins)]

        given, taken = call.flat.input_ptr + start, call.flat.output_ptr + start
        self._core.copy([(staged[me], given, num_bytes)], main.cuda_stream)
        self._join(main)  # else a peer may overwrite sums that this rank still fetches
        self._meet(call)
        self._fork(main)
        step = max(LEAST_SEGMENT_BYTES, _packs(-(-row // NUM_SEGMENTS)))
        for at in range(0, sizes[me], step):
            part = min(step, sizes[me] - at)
            to = brought + world * at  # of this segment a row of every rank
            rows = [to + rank * _packs(part) for rank in range(world)]
            of = [base + begins[me] + at for base in staged]
            self._copy_all([(one, other, part) for one, other in zip(rows, of, strict=True)])
            self._join(main)
            numel = part // ITEMSIZE[DType(call.plan.dtype)]
            self._sums.add(call.plan, rows, sums[me] + at, numel, main.cuda_stream)
        self._meet(call)
        self._fork(main)
        self._copy_all([(taken + begins[r], sums[r], sizes[r]) for r in range(world)])

    def _meet(self, call: _Call) -> None:
        """Let the main stream wait until the main streams of all ranks come here."""
        flat = call.flat
        self._core.launch(
            call.plan, flat.input_ptr, flat.output_ptr, call.main.cuda_stream, call.limit_s
        )

    def _copy_all(self, copies: list[_Copy]) -> None:
        """Start copies, one of every rank, beside each other; each rank begins with its own."""
        mine = [one for one in copies[self._rank :] + copies[: self._rank] if one[2] > 0]
        for idx, stream in enumerate(self._streams):
            self._core.copy(mine[idx :: len(self._streams)], stream.cuda_stream)

    def _fork(self, main: Any) -> None:
        """Let the copy streams wait for the current work of the main stream."""
        for stream in self._streams:
            stream.wait_stream(main)

    def _join(self, main: Any) -> None:
        """Let the main stream wait for the current work of the copy streams.

        In a capture this covers the work of the capture only. The order of a replay and eager calls
        is up to the streams on which the program replays it.
        """
        captured = _is_captured(main)
        for stream in self._streams:
            if not captured or _is_captured(stream):
                main.wait_stream(stream)


def _is_captured(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
