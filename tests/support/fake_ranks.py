# SPDX-License-Identifier: Apache-2.0
"""Ranks in threads whose tensors lie on a CUDA made of the CPU, and checks of their known calls.

The tensors are the CPU's, and pass for a GPU's. A launch does nothing but note its arguments.
"""

import contextlib
import ctypes
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.support.fake_cuda import FakeCuda, build_fake_cuda

DEVICE = 0
LIMIT_S = 20.0


@dataclass(frozen=True)
class Stream:
    """A stream of torch's, or an event: nothing runs there."""

    cuda_stream: int = 1

    def do_nothing(self, *_: Any) -> bool:
        return True

    wait_stream = wait_event = record = query = do_nothing


@contextlib.contextmanager
def tensors_on_gpu(cuda: FakeCuda) -> Iterator[SimpleNamespace]:
    """Let CPU tensors pass for those of a GPU.

    The value's `stream` is torch's current one, and `kept_for` the streams that tensors were
    recorded for.
    """
    import torch

    from fastcoll.calls import arrays, tensor_layout
    from fastcoll.gpu import group, nccl

    kept_for: list[Stream] = []
    state = SimpleNamespace(device=DEVICE, stream=0, kept_for=kept_for)

    def use(stream: int) -> None:
        state.stream = stream
        cuda.use_stream(stream)

    state.use = use
    real_view = arrays._view_tensor

    def view_on_gpu(tensor: Any, name: str, gpu: bool) -> arrays.ArrayView:
        return replace(real_view(tensor, name, gpu), device=state.device)

    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (nccl, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "Stream", lambda *_, **__: Stream()),
            (torch.cuda, "Event", Stream),
            (torch.cuda, "stream", contextlib.nullcontext),
            (torch.cuda, "current_stream", lambda device: Stream(state.stream)),
            (torch.Tensor, "record_stream", kept_for.append),  # C's, as torch's own
            (tensor_layout, "_empty_on", lambda device: torch.empty(0)),
            (arrays, "_view_tensor", view_on_gpu),
            (group.watcher, "add", lambda side: None),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        cuda.put_tensors_on(DEVICE)
        try:
            yield state
        finally:
            cuda.put_tensors_on(-1)


@contextlib.contextmanager
def heap_of_floats() -> Iterator[None]:
    """Let symmetric tensors be eight floats of the CPU."""
    import numpy as np
    import torch

    from fastcoll.gpu import group

    def tensor_on(block: Any, *_: Any) -> Any:
        array = np.frombuffer((ctypes.c_char * 32).from_address(block.ptr), np.float32)
        return torch.from_numpy(array)

    with mock.patch.object(group, "tensor_on", tensor_on):
        yield


@contextlib.contextmanager
def two_ranks(cuda: FakeCuda, both: Callable[[Any], Any] | None = None) -> Iterator[Any]:
    """Two ranks, which are threads of one GPU, and have called there.

    The value is the program's rank. It has its `comm`, the other rank's `peer`, and the `gpu` of
    `tensors_on_gpu`. Both ranks do `both`, if it is given, and `result` is this rank's.
    """
    import torch
    import torch.distributed as dist

    from fastcoll.group.communicator import Communicator

    store, me = dist.HashStore(), SimpleNamespace()

    def begin(rank: int) -> tuple[Any, Any]:
        comm = Communicator.from_store(store, rank, 2, timeout_s=10.0)
        comm.all_reduce(torch.ones(3))
        return comm, both and both(comm)

    with tensors_on_gpu(cuda) as me.gpu, ThreadPoolExecutor(1) as pool:
        other = pool.submit(begin, 1)
        me.comm, me.result = begin(0)
        me.peer, _ = other.result(LIMIT_S)
        try:
            yield me
        finally:
            for comm in (me.comm, me.peer):
                comm.close()


@contextlib.contextmanager
def all_known() -> Iterator[None]:
    """Nothing here may need a Python function."""
    found: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        ours = ("all_known", "_GeneratorContextManager")
        assert [name for name in found if not name.startswith(ours)] == []


@contextlib.contextmanager
def looked_at() -> Iterator[None]:
    """A call of all_reduce here must come to Python."""
    from tests.support.fallbacks import noting

    with noting("all_reduce") as found:
        yield
    assert found, "it was started without a closer look"


@contextlib.contextmanager
def raises(kind: type[Exception], text: str) -> Iterator[list[str]]:
    """An error of this kind must be raised; the value gets its text, which has this one."""
    told: list[str] = []
    try:
        yield told
    except kind as error:
        told.append(str(error))
        assert text in told[0], error
    else:
        raise AssertionError(f"no {kind.__name__}")


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, "it never holds"
        time.sleep(0.001)


def run_program(functions: dict[str, Any]) -> None:
    """Run the function of the command line's first name on the extension of the second.

    That is built, optimised, if it is not given.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            built = sys.argv[2:] or [str(build_fake_cuda(Path(folder), "-O2"))]
            functions[sys.argv[1]](FakeCuda(built[0]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at once: a blocked launch would hold up the end
