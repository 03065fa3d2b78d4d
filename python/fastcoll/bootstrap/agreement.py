# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a broken group go on together: one answer for all ranks that are left.

The answer is a word in memory that all ranks of the old group share. It is 0 until one rank writes,
by compare-exchange, the ranks that go on. Later ranks read that answer. No rank acts before it has
read the answer. So there is one answer, even if ranks die, stop or resume at any moment. With
a compare-exchange any number of processes agree (Herlihy, "Wait-free synchronization", TOPLAS 13,
1991).

Decides when a rank proposes an answer, and which ranks the answer names. Pure: the inputs are the
parts that each rank holds, the ranks that are gone, and the time. Must not know sockets, processes
or memory.

1. Every rank sends every other rank its part of the new group. A rank publishes the ranks whose
   parts it holds. It adds itself once its own part was sent to all: then it has joined.
2. A rank is able to go on if it has joined, is not gone, and holds the parts of all such ranks.
   Once all ranks that are not gone are able, any of them proposes them.
3. The others wait for a rank that has not joined, up to the limit; any rank's limit ends the wait.
   A rank that has joined and does not take the others' parts was stopped. The wait for it is short.

An answer may name a rank that has died since: the new group's first call finds that out. Time alone
tells that a rank is late. So a rank that was stopped may find that it is left out.
"""

from collections.abc import Collection
from typing import Protocol

GRACE_S = 2.0  # for a rank that has joined to take the others' parts, on a busy machine


class Ballot(Protocol):
    """Words that the ranks of the old group share, and that outlive each of them; ranks as bits."""

    def hold_parts(self, ranks: int) -> None:
        """Publish the ranks whose parts this rank holds, with itself once its own went to all."""

    def parts_held(self) -> list[int]:
        """Return the parts that every rank holds, by rank."""

    def decide_survivors(self, ranks: int) -> int:
        """Make these the ranks that go on, unless that is decided. Return the decision, or 0.

        0 changes nothing.
        """


def bits(ranks: Collection[int]) -> int:
    return sum(1 << rank for rank in ranks)


def ranks_in(word: int) -> list[int]:
    """Return the ranks of a word of bits, in ascending order."""
    return [rank for rank in range(word.bit_length()) if word >> rank & 1]


class Agreement:
    """One rank's state of the agreement."""

    def __init__(self, rank: int, world_size: int, now_s: float, limit_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._join_until_s = now_s + limit_s
        self._seen: object = None
        self._moved_s = now_s  # when something was last seen to change
        self._looked_s = now_s

    def proposal(self, held: list[int], gone: Collection[int], now_s: float) -> int:
        """Return the ranks that shall go on, this one among them, as bits; 0 while it has to wait.

        Args:
            held: The parts that every rank holds, by rank. Read after the clock: parts published
                while this rank was stopped count.
            gone: Ranks that are gone for certain.
            now_s: The time.
        """
        if now_s - self._looked_s > GRACE_S / 2:  # this rank was stopped: others shall not pay
            self._join_until_s = max(self._join_until_s, now_s + GRACE_S)
            self._moved_s = now_s
        self._looked_s = now_s
        here = [rank for rank in range(self._world_size) if rank not in gone]
        joined = bits([rank for rank in here if held[rank] >> rank & 1])
        is_open = joined != bits(here) and now_s < self._join_until_s
        if (seen := (held, here, is_open)) != self._seen:
            self._seen, self._moved_s = seen, now_s
        if is_open:
            return 0
        waited_s = now_s - self._moved_s
        if waited_s >= 2 * GRACE_S:  # ranks without parts here might have gone on without this one
            joined &= held[self._rank]
        able = bits([rank for rank in ranks_in(joined) if not joined & ~held[rank]])
        is_time = able == joined or waited_s >= GRACE_S
        return able if is_time and able >> self._rank & 1 else 0
