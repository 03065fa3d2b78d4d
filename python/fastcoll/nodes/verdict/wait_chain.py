# SPDX-License-Identifier: Apache-2.0
"""The chain of waits in sends and receives: each rank writes on the board which rank it waits for.

So a timeout names the rank at the end of a chain, on any node, and not the next rank, which may be
waiting itself. Must not know how messages travel.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from fastcoll.nodes.verdict.board import Board

CYCLE = ": a cycle. Use isend, or batch_isend_irecv"  # csrc/cpu/p2p_failure.h says so, too


class Waits:
    """The chain, as one rank writes and reads it."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank

    @contextmanager
    def announced(self, peer: int, sends: bool) -> Iterator[None]:
        """Write on the board that this rank waits for another one.

        After an error the entry stays: other ranks may follow the chain yet.
        """
        self._write(f"{'sends to' if sends else 'receives from'} rank {peer}")
        yield
        self._write("")

    def _write(self, text: str) -> None:
        self._board.say(f"waits/{self._rank}", text)

    def follow(self, peer: int) -> tuple[str, int]:
        """Return the chain of waits from a rank on, as text, and the rank at its end.

        A chain that ends nowhere leaves the rank that it began with.
        """
        told, rank, seen = "", peer, {self._rank}
        while rank not in seen:
            seen.add(rank)
            what = self._board.read(f"waits/{rank}")
            if not what:
                return told, rank
            told += f"; rank {rank} {what}" if not told else f", which {what}"
            rank = int(what.rsplit(" ", 1)[1])
        return told + CYCLE, peer
