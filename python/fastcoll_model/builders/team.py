# SPDX-License-Identifier: Apache-2.0
"""The language of the builders: the ranks of a phase, and the blocks that each answers for.

A phase works in place on the ranks' scratch, whose blocks are numbered as in the message. So phases
compose: all_reduce is a reduce_scatter followed by an all_gather, hierarchical the same on subsets
of the ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fastcoll_model.schedule import Copy, Program, Reduce, Signal, Span, Wait

Piece = tuple[int, int]
"""(first block, number of blocks)."""


def merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces with neighbours joined."""
    start = count = 0
    for first, more in pieces:
        if count and first == start + count:
            count += more
            continue
        if count:
            yield start, count
        start, count = first, more
    if count:
        yield start, count


@dataclass(frozen=True, slots=True)
class Team:
    """One rank's view of a phase.

    Attributes:
        ranks: The ranks that take part; members are named by their place in it.
        me: My place.
        chunks: The blocks that each member answers for.
        channel: The channel that the phase runs in, on every member.
        root: The member that gives or gets, in a phase that has one.
    """

    ranks: Sequence[int]
    me: int
    chunks: Sequence[tuple[Piece, ...]]
    channel: int = 0
    root: int = 0

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def pieces(self, chunks: Iterable[int]) -> Iterator[Piece]:
        """Yield the blocks of the chunks, which are counted round the team."""
        size = len(self.ranks)
        return merged(piece for chunk in chunks for piece in self.chunks[chunk % size])

    def everything(self) -> range:
        """Return all chunks."""
        return range(len(self.ranks))

    def signal(self, member: int) -> Signal:
        """Tell `member`, counted round the team, to go on."""
        return Signal(self.ranks[member % len(self.ranks)], self.channel)

    def wait(self, member: int) -> Wait:
        """Wait for `member`, counted round the team."""
        return Wait(self.ranks[member % len(self.ranks)], self.channel)

    def span(self, member: int, piece: Piece) -> Span:
        """Return the piece in the member's scratch."""
        return Span(self.ranks[member % len(self.ranks)], "scratch", *piece)

    def copy(self, source: int, destination: int, piece: Piece) -> Program:
        """Copy a piece from the source's scratch to the destination's."""
        yield Copy(self.span(destination, piece), self.span(source, piece))

    def sum(self, members: Sequence[int], piece: Piece) -> Program:
        """Add the members' piece in the order given; the sum goes to my scratch."""
        if list(members) != [self.me]:
            yield Reduce(self.span(self.me, piece), tuple(self.span(m, piece) for m in members))

    def push(self, member: int, chunks: Iterable[int]) -> Program:
        """Copy chunks from my scratch to the member's."""
        for piece in self.pieces(chunks):
            yield from self.copy(self.me, member, piece)

    def pull(self, member: int, chunks: Iterable[int]) -> Program:
        """Copy chunks from the member's scratch to mine."""
        for piece in self.pieces(chunks):
            yield from self.copy(member, self.me, piece)

    def add(self, members: Sequence[int], chunks: Iterable[int]) -> Program:
        """Add the members' chunks in the order given; the sum goes to my scratch."""
        for piece in self.pieces(chunks):
            yield from self.sum(members, piece)

    def meet(self) -> Program:
        """Wait until every member has come here: signal all, then wait for all."""
        others = range(self.me + 1, self.me + self.size)
        yield from map(self.signal, others)
        yield from map(self.wait, others)
