# SPDX-License-Identifier: Apache-2.0
"""The last calls of every rank on its GPU, for the text of an error.

C++ writes and reads the entries (csrc/group/gpu_journal.h). Decides how the entries of two ranks
are compared, and the texts. Must not know calls.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from fastcoll.native import _C

_Texts: TypeAlias = dict[int, tuple[str, str]]  # of entries, and their sites, by number


def _at_site(text: str, site: str) -> str:
    return f"{text} at {site}" if site else text


class ToCome(NamedTuple):
    """Collectives and messages about to start; of a message: whether it is sent, and the peer."""

    calls: int = 0
    messages: Sequence[tuple[bool, int]] = ()


NOTHING = ToCome()


class Journal:
    """The last calls of every rank of a group. Making one is collective."""

    def __init__(self, rank: int, world_size: int, exchange: Callable[[int], list[int]]) -> None:
        """Make this rank's pages; `exchange` gives a descriptor and returns those of all ranks."""
        # The entries. It writes this rank's calls.
        self.core = _C.GpuJournal(rank, exchange(_C.GpuJournal.create(world_size)))
        self._rank = rank

    def has_ended_calls(self, peer: int, to_come: ToCome = NOTHING) -> bool:
        """Whether a peer made every call that this rank made with it, and its kernels are over.

        Args:
            peer: The peer.
            to_come: Calls that this rank is about to make; the peer must have made them, too.
        """
        core = self.core
        pairs = [(core.num_calls() + to_come.calls, core.calls(peer))]
        for sends in (False, True):
            its = core.messages(peer, not sends, self._rank)
            mine = core.num_messages(sends, peer) + to_come.messages.count((sends, peer))
            pairs.append((mine, its))
        made = all(max(its, default=0) >= number for number, its in pairs)
        return made and core.has_finished(peer)

    def last_call(self, rank: int) -> str:
        """Return the last collective that a rank started, with its number; or that it made none."""
        calls = self.core.calls(rank)
        if not calls:
            return "none"
        number = max(calls)
        return f"{number}, {_at_site(*calls[number])}"

    def difference(self, one: int, other: int) -> str:
        """Return the first call in which two ranks differ, both sides; or nothing."""
        core = self.core
        if found := _first_difference(core.calls(one), core.calls(other)):
            number, first, second = found
            return f"collective {number}: rank {one} called {first}, rank {other} called {second}"
        for sender, receiver in ((one, other), (other, one)):
            given = core.messages(sender, True, receiver)
            if found := _first_difference(given, core.messages(receiver, False, sender)):
                number, first, second = found
                return (
                    f"message {number} from rank {sender} to rank {receiver}: sent is {first}, "
                    f"expected is {second}"
                )
        return ""


def _first_difference(mine: _Texts, theirs: _Texts) -> tuple[int, str, str] | None:
    """Return the number and both texts of the first entry that differs."""
    for number in sorted(mine.keys() & theirs.keys()):
        if mine[number][0] != theirs[number][0]:
            return number, _at_site(*mine[number]), _at_site(*theirs[number])
    return None
