# SPDX-License-Identifier: Apache-2.0
"""The last calls of every rank on its GPU, for the text of an error.

A kernel that finds a different call sees its stamp only. So the host writes each collective, and
each message to or from a peer, as text where all ranks can read it. Decides the layout; must not
know calls. Nothing waits for these words, and only errors read them.
"""

import mmap
import os
import struct
from collections import Counter
from collections.abc import Callable

_ENTRY_BYTES = 256
_CALLS, _MESSAGES = 64, 8  # kept: collectives; messages of each peer and direction
_FINISHED = "its kernels are over"
_HEAD = struct.Struct("<QH")  # number of the call, bytes of its text


def _at_site(text: str, site: str) -> str:
    return f"{text} at {site}" if site else text


class Journal:
    """The last calls of every rank of a group. Making one is collective."""

    def __init__(self, rank: int, world_size: int, exchange: Callable[[int], list[int]]) -> None:
        """Make this rank's pages; `exchange` gives a descriptor and returns those of all ranks."""
        self._last = _entries_of(False, world_size)[:1]  # behind those of all peers
        num_bytes = self._last.stop * _ENTRY_BYTES
        fd = os.memfd_create("fastcoll-journal", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        fds = exchange(fd)
        try:
            self._pages = [mmap.mmap(one, num_bytes) for one in fds]
        finally:
            for one in fds:
                os.close(one)
        self._rank = rank
        self._numbers: Counter[range] = Counter()  # of the texts written, by their entries

    def write(self, call: str, site: str = "") -> None:
        """Write this rank's next call, and its place in the program if that is known."""
        self._write(range(_CALLS), call, site)

    def write_message(self, sends: bool, peer: int, message: str, site: str = "") -> None:
        """Write down the next message to a peer, or the next that is expected from it."""
        self._write(_entries_of(sends, peer), message, site)

    def finish(self) -> None:
        """Write that all of this rank's kernels have ended."""
        self._write(self._last, _FINISHED, "")

    def has_done_its_part(self, peer: int) -> bool:
        """Whether a peer made every call that this rank made with it, and its kernels are over."""
        pairs = [(range(_CALLS), range(_CALLS))]
        for sends in (False, True):
            pairs.append((_entries_of(sends, self._rank), _entries_of(not sends, peer)))
        made = all(
            max(self._read(peer, its), default=0) >= self._numbers[mine] for its, mine in pairs
        )
        return made and bool(self._read(peer, self._last))

    def last_call(self, rank: int) -> str:
        """Return the last collective that a rank started, with its number; or that it made none."""
        calls = self._read(rank, range(_CALLS))
        if not calls:
            return "none"
        number = max(calls)
        return f"{number}, {_at_site(*calls[number])}"

    def difference(self, one: int, other: int) -> str:
        """Return the first call in which two ranks differ, both sides; or nothing."""
        calls = range(_CALLS)
        if found := self._first_difference((one, calls), (other, calls)):
            number, first, second = found
            return f"collective {number}: rank {one} called {first}, rank {other} called {second}"
        for sender, receiver in ((one, other), (other, one)):
            given, taken = _entries_of(True, receiver), _entries_of(False, sender)
            if found := self._first_difference((sender, given), (receiver, taken)):
                number, first, second = found
                return (
                    f"message {number} from rank {sender} to rank {receiver}: sent is {first}, "
                    f"expected is {second}"
                )
        return ""

    def _first_difference(
        self, one: tuple[int, range], other: tuple[int, range]
    ) -> tuple[int, str, str] | None:
        """Return the number and both texts of the first entry that differs."""
        mine, theirs = self._read(*one), self._read(*other)
        for number in sorted(mine.keys() & theirs.keys()):
            if mine[number][0] != theirs[number][0]:
                return number, _at_site(*mine[number]), _at_site(*theirs[number])
        return None

    def _write(self, entries: range, text: str, site: str) -> None:
        self._numbers[entries] += 1
        number = self._numbers[entries]
        raw = f"{text}\0{site}".encode()[: _ENTRY_BYTES - _HEAD.size]
        start = entries[number % len(entries)] * _ENTRY_BYTES
        page = self._pages[self._rank]
        page[start + _HEAD.size : start + _HEAD.size + len(raw)] = raw
        _HEAD.pack_into(page, start, number, len(raw))

    def _read(self, rank: int, entries: range) -> dict[int, tuple[str, str]]:
        """Return the texts of some entries of a rank, and their call sites, by number."""
        page, texts = self._pages[rank], {}
        for entry in entries:
            start = entry * _ENTRY_BYTES
            number, size = _HEAD.unpack_from(page, start)
            start += _HEAD.size
            if number:
                text, _, site = page[start : start + size].decode(errors="replace").partition("\0")
                texts[number] = (text, site)
        return texts

    def close(self) -> None:
        """Unmap the pages."""
        for page in self._pages:
            page.close()


def _entries_of(sends: bool, peer: int) -> range:
    start = _CALLS + (2 * peer + sends) * _MESSAGES
    return range(start, start + _MESSAGES)
