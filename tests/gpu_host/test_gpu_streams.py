# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory on a GPU that is used again: the new tensor's stream waits for the old one's."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.errors import UsageError
from fastcoll.gpu.streams import BlockStreams
from fastcoll.memory.heap import SymmetricHeap
from tests.support.gpu import needs_gpu_part

BASE = 0x10000


class Stream:
    """A stream that notes for which others it waits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[str] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited.append(other.name)


@pytest.fixture
def side() -> Iterator[Any]:
    """The GPU side of a group of one rank, whose symmetric memory nothing reads."""
    from fastcoll.gpu import group

    alone = SimpleNamespace(gather_words=lambda words: [words], add_shared_arena=lambda size: BASE)
    side = group.DeviceGroup.__new__(group.DeviceGroup)
    side.device, side._pin, side._streams = 0, None, BlockStreams()
    side.terms = SimpleNamespace(reaches_peers=True)  # type: ignore[assignment]
    side._heap = SymmetricHeap(alone, 0, 1)  # type: ignore[arg-type]
    side.current, side.capturing = Stream("main"), False  # type: ignore[attr-defined]
    cuda = SimpleNamespace(
        current_stream=lambda device: side.current,  # type: ignore[attr-defined]
        is_current_stream_capturing=lambda: side.capturing,  # type: ignore[attr-defined]
        stream=mock.MagicMock(),
    )

    def tensor_on(block: Any, *args: Any) -> Any:
        return block

    with (
        mock.patch.object(group, "torch", SimpleNamespace(cuda=cuda, Tensor=torch.Tensor)),
        mock.patch.object(group, "tensor_on", tensor_on),
    ):
        yield side


@needs_gpu_part
def test_memory_is_used_again_behind_every_stream_that_used_it(side: Any) -> None:
    main, other, third = side.current, Stream("other"), Stream("third")
    block = side.empty((1000,), torch.float32)
    side.current = other  # a call of the group's in another stream
    view = SimpleNamespace(ptr=block.ptr + 16, source=None, stream=None, device=0)
    side._issue(lambda stream: None, [view], False)
    side._heap.release(block.block_id)
    side.current = third
    again = side.empty((1000,), torch.float32)
    assert again.ptr == block.ptr
    assert sorted(third.waited) == ["main", "other"]
    side._heap.release(again.block_id)
    assert side.empty((1000,), torch.float32).ptr == block.ptr
    assert sorted(third.waited) == ["main", "other"], "in its own stream nothing has to wait"
    assert main.waited == []


@needs_gpu_part
def test_none_is_made_in_a_capture(side: Any) -> None:
    side.capturing = True
    with pytest.raises(UsageError, match="can't be made in a capture: make it before"):
        side.empty((1000,), torch.float32)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_byte_knows_its_streams(data: st.DataObject) -> None:
    """Compare with a model that keeps the streams of each byte."""
    found, model = BlockStreams(), {}
    for _ in range(data.draw(st.integers(1, 12))):
        start, size = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 8))
        stream = data.draw(st.sampled_from("abc"))
        if data.draw(st.booleans()):
            used = range(start, start + size)
            expected = set().union(*(model.get(at, set()) for at in used)) - {stream}
            assert found.make(start, size, stream) == expected
            shared = {stream}
            for at in used:
                model[at] = shared
        else:
            found.use(start, stream)
            if start in model:
                # The span of that byte: the bytes beside it that share its set, on both sides.
                same = model[start]
                low = high = start
                while model.get(low - 1) is same:
                    low -= 1
                while model.get(high + 1) is same:
                    high += 1
                for at in range(low, high + 1):
                    model[at] = same | {stream}
                fresh = model[low]
                for at in range(low, high + 1):
                    model[at] = fresh


def test_a_handle_asks_nothing_in_a_capture() -> None:
    """CUDA answers such a question by an error, which may invalidate the capture."""
    from fastcoll.gpu import work

    is_capturing, asked = False, []
    event = SimpleNamespace(record=lambda stream: None, query=lambda: not asked.append(1))  # type: ignore[func-returns-value]
    stream = mock.MagicMock()
    cuda = SimpleNamespace(
        current_stream=lambda device: stream,
        is_current_stream_capturing=lambda: is_capturing,
        stream=lambda stream: contextlib.nullcontext(),
        Event=lambda: event,
    )
    group = SimpleNamespace(device=0, check=lambda: None)

    def start() -> work.DeviceWork:
        return work.DeviceWork(group, work.beside(stream, 0, lambda stream: None, []), [])

    with mock.patch.object(work, "torch", SimpleNamespace(cuda=cuda, Tensor=torch.Tensor)):
        before, is_capturing = start(), True
        captured = start()
        for one in (before, captured):
            assert not one.is_completed()
            assert one.exception() is None
            assert one.wait(30.0)
        assert not asked
        is_capturing = False
        assert before.is_completed()
        assert len(asked) == 1
        assert not captured.is_completed(), "its graph was not replayed, as far as CUDA says"
        assert len(asked) == 1
