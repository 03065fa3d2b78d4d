# SPDX-License-Identifier: Apache-2.0
"""Prove a schedule, or name the rank and step at which it is wrong.

Runs the schedule once, on symbols, and keeps a vector clock per channel. One run is enough for all
interleavings:

- Counters only grow, and each has one writer and one waiter. So a wait returns on the same signal
  by every timing (a Kahn network). A schedule that ends in one order ends in every order, and
  a schedule that gets stuck in one order gets stuck in all.
- So "happens before" is one fixed partial order. Two accesses to a block of which one writes are
  safe only if it orders them. If all such pairs are ordered, reads are the same in every
  interleaving, hence so are the results. Every order of the run finds a pair that is not ordered.
  Its later access meets the clock of the other (Flanagan and Freund, FastTrack, 2009).

The user's memory belongs to the user outside the call. No rank may read or write a peer's input or
output before that peer has entered the call, nor after it has returned. Scratch is the library's.
The rule of `done` in kernels/README.md lets a later call use scratch again. A signal without a
waiter is an error too: the next call would take it for one of its own.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcoll_model.errors import ModelError
from fastcoll_model.schedule import (
    EVERY,
    REDUCTIONS,
    Contribution,
    Copy,
    Reduce,
    Schedule,
    Signal,
    Span,
    Step,
    Wait,
)
from fastcoll_model.values import Sum, Value, contributions, in_rank_order, order

Clock = NDArray[np.int64]


class ScheduleError(ModelError):
    """A schedule is wrong; the text names the rank and the step."""


@dataclass(frozen=True)
class Proof:
    """The facts about a schedule that passed.

    Attributes:
        orders: For each block of the message, in which order its contributions were added; empty
            for verbs that only move data.
        rank_order: All of them are 0 + 1 + ... + n-1.
        same_on_all_ranks: All ranks that get a block get it in the same bits.
        num_steps: Steps of all ranks.
        num_signals: Signals between different ranks.
        blocks_in: Blocks that each rank gets from others, counted once for each source.
        scratch_blocks: Scratch that a rank needs.
    """

    orders: dict[int, str]
    rank_order: bool
    same_on_all_ranks: bool
    num_steps: int
    num_signals: int
    blocks_in: list[int]
    scratch_blocks: int


class _Place(NamedTuple):
    """A step of a program. Few are ever put into words, which takes longer than a check does."""

    rank: int
    channel: int
    number: int
    step: Step | None  # None: of the rank's caller

    def __str__(self) -> str:
        if self.step is None:
            return f"rank {self.rank}'s caller"
        channel = f" channel {self.channel}" if self.channel else ""
        return f"rank {self.rank}{channel} step {self.number} ({self.step})"


@dataclass(slots=True)
class _Access:
    """The last access to a block: channel, time on that channel's clock, and step to blame."""

    stream: int
    time: int
    place: "_Place"


@dataclass(slots=True)
class _Cell:
    """One block of memory."""

    value: Value | None = None
    write: _Access | None = None
    reads: dict[int, _Access] = field(default_factory=dict)


class _Stream:
    """One channel of one rank on its way through its steps."""

    def __init__(self, index: int, rank: int, channel: int, steps: Iterator[Step]) -> None:
        self.index = index
        self.rank = rank
        self.channel = channel
        self.steps = steps
        self.num_done = 0
        self.blocked: Wait | None = None
        self.step: Step | None = None

    def where(self) -> _Place:
        """Return the step that is running."""
        return _Place(self.rank, self.channel, self.num_done, self.step)


def check(schedule: Schedule) -> Proof:
    """Prove that every rank ends with exactly the right contributions, in every interleaving.

    Raises:
        ScheduleError: A rank ends with wrong contributions, accesses to a block race, a signal is
            left over, or ranks deadlock.
    """
    return _Run(schedule).prove()


class _Run:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.num_channels = schedule.num_channels
        n, num_streams = schedule.world_size, schedule.world_size * schedule.num_channels
        self.streams = [
            _Stream(
                i, *divmod(i, self.num_channels), schedule.program(*divmod(i, self.num_channels))
            )
            for i in range(num_streams)
        ]
        # After the channels come the ranks' callers, with their accesses before the call.
        self.clocks = np.zeros((num_streams, num_streams + n), np.int64)
        for i in range(num_streams):
            self.clocks[i, i] = self.clocks[i, num_streams + i // self.num_channels] = 1
        self.pending: dict[tuple[int, int], list[tuple[Clock, _Place]]] = {}
        self.waiting: dict[tuple[int, int], _Stream] = {}
        self.cells: dict[tuple[int, str, int], _Cell] = {}
        self.num_signals = 0
        self.blocks_in = [0] * n
        self.scratch_blocks = 0
        for rank in range(n):
            self._enter(rank)

    def _enter(self, rank: int) -> None:
        """Fill the input and output of a rank as its caller does."""
        before = _Access(len(self.streams) + rank, 1, _Place(rank, 0, 0, None))
        for block in range(self.schedule.input_blocks(rank)):
            self.cells[rank, "input", block] = _Cell(Contribution(rank, block), before)
        for block in range(self.schedule.output_blocks(rank)):
            self.cells[rank, "output", block] = _Cell(None, before)

    def prove(self) -> Proof:
        ready = list(reversed(self.streams))
        while ready:
            stream = ready.pop()
            for step in stream.steps:
                stream.step = step
                if isinstance(step, Wait):
                    if not self._wait(stream, step):
                        break
                elif isinstance(step, Signal):
                    ready += self._signal(stream, step)
                else:
                    self._move(stream, step)
                stream.num_done += 1
        self._all_ended()
        self._all_returned()
        return self._result()

    # 1. Signals and waits.

    def _key(self, rank: int, channel: int, stream: _Stream) -> int:
        inside = 0 <= rank < self.schedule.world_size and 0 <= channel < self.num_channels
        if not inside:
            raise ScheduleError(f"{stream.where()}: there is no such rank or channel")
        return rank * self.num_channels + channel

    def _wait(self, stream: _Stream, step: Wait) -> bool:
        key = (self._key(step.rank, step.channel, stream), stream.index)
        arrived = self.pending.get(key)
        if not arrived:
            stream.blocked = step
            self.waiting[key] = stream
            return False
        clock, _ = arrived.pop(0)
        np.maximum(self.clocks[stream.index], clock, out=self.clocks[stream.index])
        return True

    def _signal(self, stream: _Stream, step: Signal) -> list[_Stream]:
        key = (stream.index, self._key(step.rank, step.channel, stream))
        clock = self.clocks[stream.index]
        self.num_signals += step.rank != stream.rank
        sleeper = self.waiting.pop(key, None)
        if sleeper is None:
            self.pending.setdefault(key, []).append((clock.copy(), stream.where()))
        else:
            mine = self.clocks[sleeper.index]
            np.maximum(mine, clock, out=mine)
            sleeper.blocked = None
            sleeper.num_done += 1
        clock[stream.index] += 1
        return [] if sleeper is None else [sleeper]

    # 2. Data.

    def _move(self, stream: _Stream, step: Copy | Reduce) -> None:
        sources = (step.src,) if isinstance(step, Copy) else step.srcs
        if any(
            span.num_blocks != step.dst.num_blocks or span.num_blocks < 1
            for span in (step.dst, *sources)
        ):
            raise ScheduleError(f"{stream.where()}: the spans differ in length, or are empty")
        if isinstance(step, Copy) and step.src.rank == EVERY:
            raise ScheduleError(f"{stream.where()}: only a reduction can read from every rank")
        time = int(self.clocks[stream.index, stream.index])
        access = _Access(stream.index, time, stream.where())
        for offset in range(step.dst.num_blocks):
            values = [self._load(stream, span, offset, access) for span in sources]
            value = values[0] if len(values) == 1 else Sum(tuple(values))
            self._store(stream, step.dst, offset, value, access)

    def _ranks(self, span: Span) -> range:
        return (
            range(self.schedule.world_size)
            if span.rank == EVERY
            else range(span.rank, span.rank + 1)
        )

    def _load(self, stream: _Stream, span: Span, offset: int, access: _Access) -> Value:
        values = []
        for rank in self._ranks(span):
            cell = self._cell(stream, rank, span, offset)
            if cell.value is None:
                what = f"rank {rank}'s {span.buffer}[{span.start + offset}]"
                raise ScheduleError(f"{stream.where()}: reads {what} before it is written")
            self._ordered(stream, cell.write, "reads what may not be written yet by")
            cell.reads[stream.index] = access
            self.blocks_in[stream.rank] += rank != stream.rank
            values.append(cell.value)
        return Sum(tuple(values), in_switch=True) if span.rank == EVERY else values[0]

    def _store(
        self, stream: _Stream, span: Span, offset: int, value: Value, access: _Access
    ) -> None:
        for rank in self._ranks(span):
            if span.buffer == "input":
                raise ScheduleError(f"{stream.where()}: writes to an input")
            cell = self._cell(stream, rank, span, offset)
            self._ordered(stream, cell.write, "overwrites what may be written only later by")
            for read in cell.reads.values():
                self._ordered(stream, read, "overwrites what may still be read by")
            cell.value = value
            cell.write = access
            cell.reads = {}
            if stream.rank != rank:
                self.blocks_in[rank] += 1

    def _cell(self, stream: _Stream, rank: int, span: Span, offset: int) -> _Cell:
        block = span.start + offset
        if not 0 <= rank < self.schedule.world_size:
            raise ScheduleError(f"{stream.where()}: there is no rank {rank}")
        key = (rank, span.buffer, block)
        cell = self.cells.get(key)
        if cell is None:
            if span.buffer != "scratch" or block < 0:
                raise ScheduleError(
                    f"{stream.where()}: rank {rank}'s {span.buffer} has no block {block}"
                )
            self.scratch_blocks = max(self.scratch_blocks, block + 1)
            cell = self.cells[key] = _Cell()
        return cell

    def _ordered(self, stream: _Stream, other: _Access | None, what: str) -> None:
        if other is not None and self.clocks[stream.index, other.stream] < other.time:
            raise ScheduleError(f"{stream.where()}: {what} {other.place}; no signal orders the two")

    # 3. The end.

    def _all_ended(self) -> None:
        stuck = [stream for stream in self.streams if stream.blocked is not None]
        if stuck:
            raise ScheduleError(f"deadlock: {self._story(stuck)}")
        left = [(key, rest[0][1]) for key, rest in self.pending.items() if rest]
        if left:
            raise ScheduleError(f"{left[0][1]}: nobody waits for this signal")

    def _story(self, stuck: list[_Stream]) -> str:
        """Return the chain of waits: a cycle if there is one, else up to a rank that ended."""
        stream, path = stuck[0], []
        while stream.blocked is not None and stream not in path:
            path.append(stream)
            step = stream.blocked
            stream = self.streams[step.rank * self.num_channels + step.channel]
        if stream.blocked is not None:
            path = path[path.index(stream) :]
            end = "and so round again"
        else:
            end = f"but rank {stream.rank} has ended after {stream.num_done} steps"
        return ", ".join([*(str(each.where()) for each in path), end])

    def _all_returned(self) -> None:
        """Check that no peer is still at work in the user's memory when a rank returns."""
        ends = self.clocks.reshape(self.schedule.world_size, self.num_channels, -1).max(axis=1)
        for (rank, buffer, _), cell in self.cells.items():
            if buffer == "scratch":
                continue
            for access in (cell.write, *cell.reads.values()):
                if access is not None and ends[rank, access.stream] < access.time:
                    raise ScheduleError(
                        f"{access.place}: rank {rank} may have returned to its caller by then"
                    )

    def _result(self) -> Proof:
        """Compare every output with the one that the verb requires."""
        outputs: dict[Contribution, Value] = {}  # by the first expected contribution
        rank_order = same = True
        reduces = self.schedule.verb in REDUCTIONS
        for rank in range(self.schedule.world_size):
            for block, wanted in enumerate(self.schedule.expected(rank)):
                value = self.cells[rank, "output", block].value
                if value is not None and outputs.get(wanted[0]) is value:
                    continue  # a copy of a block that was compared before
                self._right(rank, block, value, wanted)
                if value is not None:
                    same = same and outputs.setdefault(wanted[0], value) == value
                    rank_order = rank_order and (not reduces or in_rank_order(value))
        return Proof(
            {first.block: order(value) for first, value in outputs.items() if reduces},
            rank_order,
            same,
            sum(stream.num_done for stream in self.streams),
            self.num_signals,
            self.blocks_in,
            self.scratch_blocks,
        )

    def _right(
        self, rank: int, block: int, value: Value | None, wanted: list[Contribution]
    ) -> None:
        where = f"rank {rank} ends with the wrong output: block {block}"
        if value is None:
            raise ScheduleError(f"{where} was never written")
        found = Counter(contributions(value))
        missing = [f"block {c.block} of rank {c.rank}" for c in wanted if c not in found]
        extra = [f"block {c.block} of rank {c.rank}" for c in found if c not in wanted]
        twice = [f"block {c.block} of rank {c.rank}" for c, k in found.items() if k > 1]
        for what, wrong in (("lacks", missing), ("holds", extra), ("counts twice", twice)):
            if wrong:
                writer = self.cells[rank, "output", block].write
                last = f", written by {writer.place}" if writer else ""
                raise ScheduleError(f"{where} {what} {', '.join(wrong[:4])}{last}")
