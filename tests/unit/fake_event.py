# SPDX-License-Identifier: Apache-2.0
"""What stands for a CUDA event where there is no GPU."""

from itertools import count


class Event:
    """A moment; each is a millisecond after the one before."""

    clock = count(1)

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object = None) -> None:
        self.at_ms = next(self.clock)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms
