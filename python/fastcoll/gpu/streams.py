# SPDX-License-Identifier: Apache-2.0
"""The streams that used each part of the symmetric memory on a GPU.

The work on a tensor may still run when its last reference goes. Then its memory can be given to a
new tensor, which another stream fills. Decides for which streams that one has to wait. These are,
as in torch's allocator, the stream that was current when the tensor was made, and those of the
group's calls with it. Work of the program in other streams is the program's to wait for. Must not
know the heap. A stream is an object with torch's `wait_stream`.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

_start = attrgetter("start")


class KnownUses(Protocol):
    """C++'s notes of the same: it starts a known call where Python has seen such a use."""

    def use_symmetric(self, begin: int, end: int) -> None: ...
    def note_use(self, ptr: int, stream: int) -> None: ...


@dataclass
class _Span:
    """Memory of one tensor, alive or not, and the streams that used it."""

    start: int
    stop: int
    streams: set[Any]


class BlockStreams:
    """The spans of the memory and their streams; spans do not overlap, and are in order."""

    def __init__(self, known: KnownUses | None = None) -> None:
        self._spans: list[_Span] = []
        self._known = known

    def use(self, address: int, stream: Any) -> None:
        """Note that a stream uses the tensor at an address, if one was made there."""
        if not self._spans:
            return
        index = bisect_right(self._spans, address, key=_start) - 1
        if index >= 0 and address < self._spans[index].stop:
            self._spans[index].streams.add(stream)
            if self._known is not None:
                self._known.note_use(address, stream.cuda_stream)

    def make(self, start: int, num_bytes: int, stream: Any) -> set[Any]:
        """Note a new tensor of a stream; return the other streams that used its memory before."""
        stop = start + max(1, num_bytes)
        earlier = [one for one in self._spans if one.start < stop and start < one.stop]
        for one in earlier:
            self._spans.remove(one)
            for low, high in ((one.start, start), (stop, one.stop)):
                if low < high:
                    insort(self._spans, _Span(low, high, set(one.streams)), key=_start)
        insort(self._spans, _Span(start, stop, {stream}), key=_start)
        if self._known is not None:
            self._known.use_symmetric(self._spans[0].start, self._spans[-1].stop)
        return {one for span in earlier for one in span.streams} - {stream}
