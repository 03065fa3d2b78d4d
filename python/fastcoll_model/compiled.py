# SPDX-License-Identifier: Apache-2.0
"""Schedules as the C++ executor runs them: one list of words per rank (csrc/cpu/program.h).

Decides the words, and the order in which a rank takes the steps of its channels. All ranks can run
to the end in that order. A rank keeps one count of the signals it raises, for all waiters together.
A wait for the k-th signal from a peer returns when the peer's count is the one of that signal.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fastcoll_model.builders import build
from fastcoll_model.checker import Proof, check
from fastcoll_model.errors import NotRunnableError
from fastcoll_model.schedule import EVERY, Copy, Reduce, Schedule, Signal, Span, Step, Wait

MOST_BLOCKS = 512  # Program::kMostBlocks
_COPY, _REDUCE, _SIGNAL, _WAIT = range(4)
_BUFFERS = {"input": 0, "output": 1, "scratch": 2}
_WHOLE = ("all_reduce", "broadcast", "reduce")  # all ranks' messages are of one size


@dataclass(frozen=True)
class Compiled:
    """A proven schedule, ready to run.

    Attributes:
        proof: The checker's proof of it.
        digest: Equal on two ranks exactly if all their programs are.
        blocks: Blocks of one rank's part of the message (of all of it, if it has no parts), of the
            message, and of a rank's scratch.
        programs: The words, by rank.
    """

    proof: Proof
    digest: int
    blocks: tuple[int, int, int]
    programs: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def compiled(verb: str, algorithm: str, world_size: int, root: int = 0) -> Compiled:
    """Build, prove and compile the schedule of a verb by an algorithm.

    Raises:
        ModelError: There is no such schedule.
        NotRunnableError: It can't be carried out on CPUs.
    """
    schedule = build(verb, algorithm, world_size, root=root)
    unit_blocks = schedule.num_blocks if verb in _WHOLE else schedule.chunk_blocks
    proof = check(schedule)
    blocks = (unit_blocks, schedule.num_blocks, max(schedule.num_blocks, proof.scratch_blocks))
    if blocks[-1] > MOST_BLOCKS:
        raise NotRunnableError(f"{algorithm} cuts a message into more than {MOST_BLOCKS} blocks")
    writers = [_Writer(rank, unit_blocks) for rank in range(world_size)]
    for rank, step in in_order(schedule):
        writers[rank].write(step)
    programs = tuple(tuple(writer.words) for writer in writers)
    text = repr((verb, algorithm, blocks, programs))
    # Less than 40 bits, and neither 0 nor 1: the values of Plan::splits that are left to hashes.
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % (1 << 39) + 2
    return Compiled(proof, digest, blocks, programs)


@dataclass(frozen=True)
class Told:
    """A wait that returns once `rank` has raised `count` signals."""

    rank: int
    count: int


@dataclass
class _Stream:
    """One channel of one rank on its way."""

    rank: int
    channel: int
    steps: Iterator[Step]
    waits: Wait | None = None


def in_order(schedule: Schedule) -> Iterator[tuple[int, Step | Told]]:
    """Yield all steps as one run of all ranks takes them; (rank, step).

    A rank that takes its own steps in this order never waits for a step that comes later. So the
    ranks can't wait for each other in a circle.
    """
    ranks, channels = range(schedule.world_size), range(schedule.num_channels)
    streams = [_Stream(r, c, schedule.program(r, c)) for r in ranks for c in channels]
    raised = [0 for _ in ranks]
    # From one channel to another: the sender's count at each signal without a wait so far.
    coming: dict[tuple[int, int, int, int], deque[int]] = {}
    while streams:
        num_moves = 0
        for stream in list(streams):
            for step in _runnable(stream, coming):
                num_moves += 1
                if isinstance(step, Signal):
                    raised[stream.rank] += 1
                    key = (stream.rank, stream.channel, step.rank, step.channel)
                    coming.setdefault(key, deque()).append(raised[stream.rank])
                if isinstance(step, Told) and step.rank == stream.rank:
                    continue  # between channels of one rank, whose order is fixed here
                yield stream.rank, step
            if stream.waits is None:
                streams.remove(stream)
                num_moves += 1
        if streams and not num_moves:
            raise NotRunnableError(f"{schedule.algorithm}: every rank waits")


def _runnable(
    stream: _Stream, coming: dict[tuple[int, int, int, int], deque[int]]
) -> Iterator[Step | Told]:
    """Yield the stream's steps up to a wait whose signal was not raised yet."""
    while True:
        step = stream.waits or next(stream.steps, None)
        stream.waits = None
        if step is None:
            return
        if isinstance(step, Wait):
            queue = coming.get((step.rank, step.channel, stream.rank, stream.channel))
            if not queue:
                stream.waits = step
                return
            yield Told(step.rank, queue.popleft())
        else:
            yield step


class _Writer:
    """The words of one rank's program."""

    def __init__(self, rank: int, unit_blocks: int) -> None:
        self.words: list[int] = []
        self._rank = rank
        self._unit_blocks = unit_blocks
        self._num_signals = 0
        self._ends_with_signal = False
        self._seen: dict[int, int] = {}  # signals of each rank that were waited for

    def write(self, step: Step | Told) -> None:
        """Append a step."""
        if isinstance(step, Signal):
            # Of several in a row only the last count is published.
            self._num_signals += 1
            if self._ends_with_signal:
                del self.words[-2:]
            self.words += [_SIGNAL, self._num_signals]
        elif isinstance(step, Told):
            if self._seen.get(step.rank, 0) >= step.count:
                return
            self._seen[step.rank] = step.count
            self.words += [_WAIT, step.rank, step.count]
        elif isinstance(step, Copy):
            self._move(_COPY, step.dst, [step.src])
        elif isinstance(step, Reduce):
            self._move(_REDUCE, step.dst, step.srcs)
        self._ends_with_signal = isinstance(step, Signal)

    def _move(self, kind: int, dst: Span, sources: Sequence[Span]) -> None:
        self.words += [kind, dst.num_blocks, *self._place(dst, dst)]
        self.words += [len(sources)] if kind == _REDUCE else []
        for source in sources:
            self.words += self._place(source, dst)

    def _place(self, span: Span, dst: Span) -> tuple[int, int]:
        if span.rank == EVERY:
            raise NotRunnableError("CPUs have no switch that adds and multicasts")
        if span.buffer != "scratch" and span.rank != self._rank:
            raise NotRunnableError("a schedule that reads or writes other ranks' tensors")
        # The last block of a unit is shorter than the others.
        if (span.start - dst.start) % self._unit_blocks:
            raise NotRunnableError("a schedule that moves blocks between unlike places")
        return span.rank << 2 | _BUFFERS[span.buffer], span.start
