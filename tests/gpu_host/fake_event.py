# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for CUDA's events and captured graphs where there is no GPU."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch


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


class Graph:
    """A captured graph: replaying it makes its calls again."""

    capturing: "Graph | None" = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


def use_fake_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch have them."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)


@contextlib.contextmanager
def capture(graph: Graph, stream: object, capture_error_mode: str) -> Iterator[None]:
    """Do as torch.cuda.graph does."""
    assert capture_error_mode == "thread_local"
    Graph.capturing = graph
    yield
    Graph.capturing = None
