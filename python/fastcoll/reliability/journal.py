# SPDX-License-Identifier: Apache-2.0
"""What every rank last called on its GPU, for the text of an error.

A kernel that finds another call than its own sees a stamp and no more. So the host writes each
collective down, as text, where all ranks can read it. Decides the layout; must not know calls.
Nothing waits for these words, and only errors read them.
"""

import mmap
import os
import struct
from collections.abc import Callable

_NUM_ENTRIES, _ENTRY_BYTES = 64, 256
_NUM_BYTES = _NUM_ENTRIES * _ENTRY_BYTES
_HEAD = struct.Struct("<QH")  # number of the call, bytes of its text


class Journal:
    """The last collectives of every rank of a group. Making one is collective."""

    def __init__(self, rank: int, exchange: Callable[[int], list[int]]) -> None:
        """Make this rank's pages; `exchange` gives a descriptor and returns everybody's."""
        fd = os.memfd_create("fastcoll-journal", os.MFD_CLOEXEC)
        os.ftruncate(fd, _NUM_BYTES)
        fds = exchange(fd)
        try:
            self._pages = [mmap.mmap(one, _NUM_BYTES) for one in fds]
        finally:
            for one in fds:
                os.close(one)
        self._rank = rank
        self._number = 0

    def write(self, call: str) -> None:
        """Write down what this rank calls next."""
        self._number += 1
        text = call.encode()[: _ENTRY_BYTES - _HEAD.size]
        start = self._number % _NUM_ENTRIES * _ENTRY_BYTES
        page = self._pages[self._rank]
        page[start + _HEAD.size : start + _HEAD.size + len(text)] = text
        _HEAD.pack_into(page, start, self._number, len(text))

    def difference(self, peer: int) -> str:
        """Return the first call in which a peer and this rank differ, both sides; or nothing."""
        for number in range(max(1, self._number - _NUM_ENTRIES + 1), self._number + 1):
            mine, theirs = self._read(self._rank, number), self._read(peer, number)
            if theirs is not None and mine != theirs:
                return (
                    f"collective {number}: rank {self._rank} called {mine}, rank {peer} called "
                    f"{theirs}"
                )
        return ""

    def _read(self, rank: int, number: int) -> str | None:
        """Return a rank's call; None if it is not there any more, or not yet."""
        start = number % _NUM_ENTRIES * _ENTRY_BYTES
        page = self._pages[rank]
        found, size = _HEAD.unpack_from(page, start)
        start += _HEAD.size
        return page[start : start + size].decode(errors="replace") if found == number else None

    def close(self) -> None:
        """Unmap the pages."""
        for page in self._pages:
            page.close()
