# SPDX-License-Identifier: Apache-2.0
"""The free spans of one arena: first fit, neighbours merge.

Pure and deterministic: the same calls give the same offsets on every rank.
"""

from bisect import insort


class Spans:
    """Free spans of an arena of `num_bytes`, in order of their offsets."""

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
