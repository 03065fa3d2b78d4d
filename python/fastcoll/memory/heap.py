# SPDX-License-Identifier: Apache-2.0
"""The symmetric heap of a group: blocks at the same place of every rank's arenas.

Decides where a block lies and when its memory is free: only once every rank has released it. The
order of their garbage collectors does not matter. All ranks run the same allocator on the same
facts, which they gather at each allocation. Must not know tensors or verbs.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fastcoll.errors import DesyncError, FastcollError

ALIGNMENT_BYTES = 256
ARENA_BYTES = 64 << 20  # sparse: pages come with their first use
MOST_BYTES = 1 << 60  # of a block: far below the range of an address or a word of a request
_PAGE_BYTES = 2 << 20
# Requested bytes, number of releases, releases still to come, then ids: 512 bytes, which travel
# in the flag lines.
_WORDS = 64
_IDS = _WORDS - 3


class HeapHost(Protocol):
    """The group's methods that the heap needs."""

    def gather_words(self, words: list[int]) -> list[list[int]]:
        """Return the words of all ranks, by rank. Collective."""

    def add_shared_arena(self, num_bytes: int) -> int:
        """Make an arena of every rank's memory and return its address here. Collective."""


@dataclass(frozen=True)
class Block:
    """An allocation, as this rank sees it."""

    block_id: int
    ptr: int
    num_bytes: int


class Spans:
    """Free spans of an arena of `num_bytes`, by offset: first fit, neighbours merge.

    The same calls give the same offsets on every rank.
    """

    def __init__(self, num_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, num_bytes)]

    def take(self, num_bytes: int) -> int | None:
        """Return the offset of the first span that fits, now taken, or None."""
        for i, (offset, size) in enumerate(self._free):
            if size < num_bytes:
                continue
            rest = [(offset + num_bytes, size - num_bytes)] if size > num_bytes else []
            self._free[i : i + 1] = rest
            return offset
        return None

    def give(self, offset: int, num_bytes: int) -> None:
        """Give a taken span back."""
        insort(self._free, (offset, num_bytes))
        merged: list[tuple[int, int]] = []
        for start, size in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged


@dataclass
class _Arena:
    ptr: int
    free: Spans


@dataclass
class _Live:
    arena_idx: int
    offset_bytes: int
    num_bytes: int
    waiting_for: set[int]


class SymmetricHeap:
    """Allocates blocks; every rank calls `allocate` in the same order with the same size."""

    def __init__(
        self,
        host: HeapHost,
        rank: int,
        world_size: int,
        arena_bytes: int = ARENA_BYTES,
        page_bytes: int = _PAGE_BYTES,
    ) -> None:
        """Make an empty heap; `arena_bytes` of an arena at least, a multiple of `page_bytes`."""
        self._arena_bytes = arena_bytes
        self._page_bytes = page_bytes
        self._host = host
        self._rank = rank
        self._world_size = world_size
        self._arenas: list[_Arena] = []
        self._live: dict[int, _Live] = {}
        self._next_id = 0
        # Appended to by finalizers, in any thread, so it must need no lock.
        self._released: deque[int] = deque()

    @property
    def release(self) -> Callable[[int], None]:
        """The function by which a finalizer gives a block back; safe anywhere."""
        return self._released.append

    def allocate(self, num_bytes: int) -> Block:
        """Allocate a block. Collective.

        Raises:
            DesyncError: The ranks asked for different sizes; nothing was allocated.
            FastcollError: The host can't make an arena for it; nothing was allocated.
        """
        self._collect(num_bytes)
        size = max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        arena_idx, offset = self._find(size)
        if offset is None:
            page = self._page_bytes
            arena_bytes = -(-max(self._arena_bytes, size) // page) * page
            ptr = self._host.add_shared_arena(arena_bytes)
            self._arenas.append(_Arena(ptr, Spans(arena_bytes)))
            arena_idx, offset = self._find(size)
        if offset is None:
            raise FastcollError(f"a new arena has no room for {size} bytes")
        block_id, self._next_id = self._next_id, self._next_id + 1
        everyone = set(range(self._world_size))
        self._live[block_id] = _Live(arena_idx, offset, size, everyone)
        return Block(block_id, self._arenas[arena_idx].ptr + offset, num_bytes)

    def _find(self, size: int) -> tuple[int, int | None]:
        for arena_idx, arena in enumerate(self._arenas):
            offset = arena.free.take(size)
            if offset is not None:
                return arena_idx, offset
        return -1, None

    def _collect(self, num_bytes: int) -> None:
        """Gather the requests and releases of all ranks, and free the blocks released by all."""
        more = True
        while more:
            ids = [self._released.popleft() for _ in range(min(_IDS, len(self._released)))]
            words = [num_bytes, len(ids), len(self._released), *ids]
            rows = self._host.gather_words(words + [0] * (_WORDS - len(words)))
            for rank, row in enumerate(rows):
                for block_id in row[3 : 3 + row[1]]:
                    self._live[block_id].waiting_for.discard(rank)
            more = any(row[2] for row in rows)
            freed = [block_id for block_id, live in self._live.items() if not live.waiting_for]
            for block_id in freed:
                live = self._live.pop(block_id)
                self._arenas[live.arena_idx].free.give(live.offset_bytes, live.num_bytes)
            sizes = [row[0] for row in rows]
            if len(set(sizes)) > 1:
                sides = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes))
                raise DesyncError(
                    f"empty() needs the same number of bytes on every rank, got {sides}; nothing "
                    "was allocated and the group can still be used"
                )
