# SPDX-License-Identifier: Apache-2.0
"""Programs on a CUDA made of the CPU. `python -m tests.gpu_host.cuda_programs NAME EXTENSION`."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from tests.support.fake_cuda import FakeCuda

LIMIT_S = 20.0
MINE = 3  # this rank's GPU
REGION_BYTES = 256 << 20


def in_thread(task: Callable[[], Any]) -> Any:
    """Do something in a fresh thread, which has no device of CUDA; return its result."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(task())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), f"{task} hangs"
    if errors:
        raise errors[0]
    return results[0]


def a_plan() -> Any:
    from fastcoll.choose.algorithms import shared
    from fastcoll.native import _C
    from fastcoll.types import Algorithm
    from tests.gpu_host.gpu_rows import request

    return _C.Plan(*shared.make_plan(request(), Algorithm.two_shot).args())


def a_group(device: int) -> tuple[Any, Callable[[], None]]:
    """Return a group of two regions of this process, and a function that frees them."""
    from fastcoll.native import _cuda

    regions = []
    for _ in range(2):
        ptr, fd = _cuda.vmm_create(device, REGION_BYTES)
        os.close(fd)
        regions.append(ptr)
    group = _cuda.Group(device, 0, regions, REGION_BYTES - _cuda.data_offset_bytes())
    return group, lambda: [_cuda.vmm_close(device, ptr, REGION_BYTES) for ptr in regions]


def contexts(cuda: FakeCuda) -> None:
    """No thread without a device makes a context on another GPU than this rank's."""
    from fastcoll.native import _cuda
    from fastcoll.types import DType, Op

    def step(name: str, task: Callable[[], Any]) -> Any:
        result = in_thread(task)
        assert cuda.contexts() in ([], [MINE]), f"{name}: contexts on {cuda.contexts()}"
        return result

    step("facts", lambda: _cuda.device_facts(MINE))
    step("granularity", lambda: _cuda.vmm_granularity(MINE))
    step("load", lambda: _cuda.load_kernels(MINE))
    group, free = step("group", lambda: a_group(MINE))
    step("probe", lambda: group.probe(_cuda.Probe.put, 1))
    step("launch", lambda: group.launch(a_plan(), 0, 0, 0, 1.0))
    step("transfer", lambda: group.transfer([(True, 0, 1, 0, 1, 0)], 1, 0, 1.0))
    step("copy", lambda: group.copy([(0, 0, 0)], 0))
    partials = (MINE, int(DType.float32), int(Op.SUM), False, [64], 64, 1, 0, 0)
    step("add", lambda: _cuda.add_partials(*partials))
    step("busy", group.busy)
    step("verdict", group.verdict)
    step("give up", lambda: group.give_up(1))
    step("capture", lambda: _cuda.ignore_captures(MINE))
    step("close", group.close)
    step("free", free)
    ptr, handle = step("ipc create", lambda: _cuda.ipc_create(MINE, 4096))
    opened = step("ipc open", lambda: _cuda.ipc_open(MINE, handle))
    step("ipc close", lambda: _cuda.ipc_close(MINE, opened))
    step("ipc destroy", lambda: _cuda.ipc_destroy(MINE, ptr))
    finalisers(step)
    threads_of_nodes(step)
    assert cuda.contexts() == [MINE]


def finalisers(step: Callable[[str, Callable[[], Any]], Any]) -> None:
    """A rank's region is freed by the thread that collects its last tensor."""
    from fastcoll.gpu import regions
    from fastcoll.native import _cuda

    ptr, fd = step("region", lambda: _cuda.vmm_create(MINE, REGION_BYTES))
    os.close(fd)
    pin = regions.Pin()
    free = partial(_cuda.vmm_close, MINE, ptr, REGION_BYTES)
    regions._parked.append(regions._Parked(free, [], regions.weakref.ref(pin)))
    pins = [pin]
    del pin
    step("collect", pins.clear)
    assert regions._parked == [], "it was not freed"


def threads_of_nodes(step: Callable[[str, Callable[[], Any]], Any]) -> None:
    """The threads that watch and carry transfers between nodes choose their GPU first."""
    import torch

    from fastcoll.nodes.gpus import captures
    from fastcoll.nodes.transfers.payloads import GpuPayload

    chosen: list[int] = []

    def set_device(device: int) -> None:
        chosen.append(device)

    with mock.patch.object(torch.cuda, "set_device", set_device):
        step("watcher", lambda: captures.enter_thread(MINE))
    assert chosen == [MINE]
    payload = GpuPayload.__new__(GpuPayload)
    payload.device = MINE
    with mock.patch.object(torch.cuda, "device", lambda device: mock.MagicMock()):
        step("transfer between nodes", lambda: payload.here().__enter__())


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]](FakeCuda(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at once: a blocked launch would hold up the end
