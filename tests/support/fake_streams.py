# SPDX-License-Identifier: Apache-2.0
"""Streams and events of a made-up GPU that is slow, for transfers through the host.

A stream runs its work, copies too, only when an event behind it is asked about for the third time.
So a stream that does not wait for an event reads old data, or writes too early.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fastcoll.nodes.transfers import payloads

PIECE_BYTES = 4096
POISON = 0xA5
_ASKED = 3


class Stream:
    """The functions given to it, in order.

    Attributes:
        is_stuck: It never gets on.
    """

    cuda_stream = 0

    def __init__(self) -> None:
        self.given: list[Callable[[], Any]] = []
        self.num_done = 0
        self.is_stuck = False
        self._lock = threading.RLock()

    def give(self, task: Callable[[], Any]) -> None:
        with self._lock:
            self.given.append(task)

    def run(self, num: int | None = None) -> None:
        """Do it, as far as the first `num`."""
        with self._lock:
            for task in self.given[self.num_done : num]:
                task()
                self.num_done += 1


class Event:
    """The place in a stream where it was recorded."""

    def __init__(self) -> None:
        self._num_asked = 0

    def record(self, stream: Stream) -> None:
        self._stream, self._place = stream, len(stream.given)

    def query(self) -> bool:
        self._num_asked += 1
        if self._stream.num_done < self._place:
            if self._stream.is_stuck or self._num_asked < _ASKED:
                return False
            self._stream.run(self._place)
        return True


@contextlib.contextmanager
def slow_gpu() -> Iterator[SimpleNamespace]:
    """Let transfers meet such a GPU, inside of `fake_node_gpus`.

    Yields its `main` stream, which is the current one, and `pinned`, the bytes of pinned memory
    that were asked for.
    """
    main, sides = Stream(), (Stream(), Stream())
    state = SimpleNamespace(main=main, pinned=0)
    threads = threading.local()

    def current(device: Any = None) -> Stream:
        found: Stream = getattr(threads, "stream", main)
        return found

    @contextlib.contextmanager
    def use(stream: Stream) -> Iterator[None]:
        threads.stream = stream
        try:
            yield
        finally:
            del threads.stream

    def pinned(num_bytes: int) -> torch.Tensor:
        state.pinned += num_bytes
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        current().give(lambda: target.copy_(source))

    right_copy, right_back = payloads.dense_copy, payloads.copy_back

    def dense_copy(array: Any, *, fill: bool) -> Any:
        if array.device >= 0:
            current().run()  # in stream order, as on a GPU
        return right_copy(array, fill=fill)

    def copy_back(array: Any, dense: Any) -> None:
        if array.device >= 0:
            current().give(lambda: right_back(array, dense))
        else:
            right_back(array, dense)

    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (payloads, "PIECE_BYTES", PIECE_BYTES),
            (payloads, "_stream", lambda device, sends: sides[sends]),
            (payloads, "_pinned", pinned),
            (payloads, "_copy", copy),
            (payloads, "dense_copy", dense_copy),
            (payloads, "copy_back", copy_back),
            (torch.cuda, "Event", Event),
            (torch.cuda, "current_stream", current),
            (torch.cuda, "stream", use),
            (torch.cuda, "device", contextlib.nullcontext),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        yield state


@contextlib.contextmanager
def slow_node_gpus(comm: Any, *about: Any) -> Iterator[SimpleNamespace]:
    """Put `comm`, a group over nodes, on such GPUs; collective. `about`: see `fake_node_gpus`.

    Yields the value of `slow_gpu`; its `fake` is the value of `fake_node_gpus`.
    """
    from tests.support.fake_nodes import fake_node_gpus  # only now: builds without a GPU part can't

    with fake_node_gpus(comm, *about) as fake, slow_gpu() as slow:
        slow.fake = fake
        yield slow
