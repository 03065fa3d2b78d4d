# SPDX-License-Identifier: Apache-2.0
"""A chain of sockets: all_reduce in rank order over a machine whose memory has several nodes.

The ranks of a socket add what they have, behind the sum that the socket before them hands over. So
each byte crosses from socket to socket once on its way there and once on its way back. In two_shot
it crosses once for each rank of the other sockets.

A run is a range of consecutive ranks on one socket. Runs may differ in length. Each of them shares
the whole message out among its own ranks.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise

from fastcoll_model.builders.team import Piece, merged
from fastcoll_model.schedule import Copy, Program, Reduce, Signal, Span, Wait

NAME = "socket_chain"
Runs = Sequence[range]


def runs_of(sockets: Sequence[int]) -> Runs:
    """Return the runs of ranks, of which `sockets` names each one's socket."""
    lengths = [len(list(same)) for _, same in groupby(sockets)]
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def halves(world_size: int) -> list[int]:
    """Return each rank's socket, of two; the first one may have a rank more."""
    return [rank * 2 // (world_size + world_size % 2) for rank in range(world_size)]


class Chain:
    """One rank's steps; the message has `num_blocks` blocks, moved in `num_segments` turns."""

    def __init__(self, runs: Runs, rank: int, num_blocks: int, num_segments: int = 1) -> None:
        self.runs = runs
        self.rank = rank
        self.at = next(i for i, run in enumerate(runs) if rank in run)
        self.num_blocks = num_blocks
        self.num_segments = num_segments

    def steps(self) -> Program:
        """Yield the steps between staging and delivery."""
        yield from self._meet()
        for segment in range(self.num_segments):
            yield from self._forward(segment)
        if self.at < len(self.runs) - 1:
            yield from self._back()
        yield from self._meet()
        for mate in self._mates():
            for piece in merged((block, 1) for block in self._blocks(mate)):
                yield self._copy(mate, piece)

    def _forward(self, segment: int) -> Program:
        """Add my run's inputs behind the sum of the runs before it, and hand the sum on."""
        mine = [b for b in self._blocks(self.rank) if b % self.num_segments == segment]
        if self.at > 0:
            for source in sorted({self._owner(self.at - 1, block) for block in mine}):
                yield Wait(source)
        for start, count, owner in self._pieces(mine, self.at - 1):
            before = [] if owner is None else [owner]
            terms = tuple(
                Span(rank, "scratch", start, count) for rank in (*before, *self.runs[self.at])
            )
            if len(terms) > 1:
                yield Reduce(Span(self.rank, "scratch", start, count), terms)
        # The last run hands the result back to all others.
        last = self.at == len(self.runs) - 1
        for run in range(self.at) if last else (self.at + 1,):
            yield from map(Signal, sorted({self._owner(run, block) for block in mine}))

    def _back(self) -> Program:
        """Take my blocks of the result from the last run."""
        last = len(self.runs) - 1
        mine = self._blocks(self.rank)
        for segment in range(self.num_segments):
            turn = [block for block in mine if block % self.num_segments == segment]
            for source in sorted({self._owner(last, block) for block in turn}):
                yield Wait(source)
        for start, count, owner in self._pieces(mine, last):
            assert owner is not None
            yield self._copy(owner, (start, count))

    def _meet(self) -> Program:
        yield from map(Signal, self._mates())
        yield from map(Wait, self._mates())

    def _mates(self) -> list[int]:
        """Return the other ranks of my run, from the one behind me on."""
        run = self.runs[self.at]
        return [run[(self.rank - run.start + i) % len(run)] for i in range(1, len(run))]

    def _copy(self, source: int, piece: Piece) -> Copy:
        return Copy(Span(self.rank, "scratch", *piece), Span(source, "scratch", *piece))

    def _owner(self, at: int, block: int) -> int:
        """Return the rank of a run that answers for a block."""
        run = self.runs[at]
        return run[block * len(run) // self.num_blocks]

    def _blocks(self, rank: int) -> range:
        """Return the blocks that a rank of my run answers for; see `_owner`."""
        run = self.runs[self.at]
        begin, end = (
            -(-i * self.num_blocks // len(run)) for i in (rank - run.start, rank - run.start + 1)
        )
        return range(begin, end)

    def _pieces(self, blocks: Sequence[int], at: int) -> list[tuple[int, int, int | None]]:
        """Return the stretches of blocks that one rank of another run answers for: its place."""
        owners = [self._owner(at, block) if at >= 0 else None for block in blocks]
        found = []
        for owner in dict.fromkeys(owners):
            of_owner = [b for b, own in zip(blocks, owners, strict=True) if own == owner]
            found += [(*piece, owner) for piece in merged((block, 1) for block in of_owner)]
        return found
