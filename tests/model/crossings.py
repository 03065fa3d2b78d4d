# SPDX-License-Identifier: Apache-2.0
"""The bytes of a schedule that go from one socket to another, counted step by step.

Decides what counts as a crossing; knows nothing of time. A run of all ranks is taken in an order
that the schedule's signals allow, and each block has a version that a write replaces. Two counts
bound what a machine does:

- `reads`: every read of a block on another socket crosses. So it is where a socket keeps nothing.
- `lines`: of one version a socket takes each block once, and its other ranks find it in a cache of
  their own socket. So it is where that cache holds everything.

Signals, and the messages by which a writer takes lines back, carry no data and are not counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fastcoll_model.compiled import Told, in_order
from fastcoll_model.schedule import Copy, Reduce, Schedule, Signal, Span, Wait

Way = tuple[int, int]
"""(from this socket, to that one)."""


@dataclass(frozen=True)
class Crossings:
    """The data between sockets, in messages: 2.0 are twice the bytes of a rank's message.

    Attributes:
        reads: Each read counts, by the way it takes.
        lines: A socket that has a block reads it again for nothing.
    """

    reads: dict[Way, float]
    lines: dict[Way, float]

    @property
    def all_reads(self) -> float:
        """Over all ways."""
        return sum(self.reads.values())

    @property
    def all_lines(self) -> float:
        """Over all ways."""
        return sum(self.lines.values())


def crossings(schedule: Schedule, sockets: Sequence[int]) -> Crossings:
    """Count the data that crosses where rank i runs on socket `sockets[i]`; no switch moves any."""
    count = _Count(sockets)
    for _, step in in_order(schedule):
        if not isinstance(step, Signal | Wait | Told):
            count.move(step)
    blocks = schedule.num_blocks
    return Crossings(
        {way: num / blocks for way, num in count.reads.items()},
        {way: num / blocks for way, num in count.lines.items()},
    )


class _Count:
    def __init__(self, sockets: Sequence[int]) -> None:
        self.sockets = sockets
        self.reads: Counter[Way] = Counter()
        self.lines: Counter[Way] = Counter()
        self.holders: dict[tuple[int, str, int], set[int]] = {}  # sockets that have the block

    def move(self, step: Copy | Reduce) -> None:
        """Count a step that reads and writes."""
        sources = (step.src,) if isinstance(step, Copy) else step.srcs
        target = self.sockets[step.dst.rank]
        for source in sources:
            self._take(source, target)
        for block in range(step.dst.start, step.dst.start + step.dst.num_blocks):
            self.holders[step.dst.rank, step.dst.buffer, block] = {target}

    def _take(self, span: Span, target: int) -> None:
        source = self.sockets[span.rank]
        if source == target:
            return
        for block in range(span.start, span.start + span.num_blocks):
            holders = self.holders.setdefault((span.rank, span.buffer, block), {source})
            self.reads[source, target] += 1
            self.lines[source, target] += target not in holders
            holders.add(target)
