# SPDX-License-Identifier: Apache-2.0
"""Known calls of ranks on a CUDA made of the CPU.

`python -m tests.gpu_host.known_calls NAME [EXTENSION]` runs a function of this file.
"""

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.support.fake_cuda import FakeCuda
from tests.support.fake_ranks import (
    LIMIT_S,
    all_known,
    heap_of_floats,
    looked_at,
    raises,
    run_program,
    two_ranks,
    until,
)

SECONDS = 0.05  # of a measurement


def program(cuda: FakeCuda) -> None:
    """A known call sees what the program has changed: streams, captures, limits, writes."""
    import torch

    with two_ranks(cuda) as me:
        comm, tensor = me.comm, torch.ones(9)
        comm.all_reduce(tensor)
        for stream in (5, 7, 0):
            me.gpu.use(stream)
            with all_known():
                comm.all_reduce(tensor)
            assert cuda.launched()["stream"] == stream
        cuda.capture(True)
        before = cuda.launches()
        with all_known():
            comm.all_reduce(tensor)
        cuda.capture(False)
        assert cuda.launches() == before + 1
        comm.set_timeout(7.0)
        version = tensor._version
        with all_known():
            comm.all_reduce(tensor)
        assert cuda.launched()["limit_ns"] == 7e9
        assert tensor._version == version + 1, "autograd does not see the write"
        with torch.inference_mode():
            private = torch.ones(9)
            with all_known():
                comm.all_reduce(private)
        assert cuda.launched()["input"] == private.data_ptr()
        cuda.put_tensors_on(-1)  # a call on CPUs, in between
        before = cuda.launches()
        with ThreadPoolExecutor(1) as pool, mock.patch.object(me.gpu, "device", -1):
            other = pool.submit(me.peer.all_reduce, torch.ones(2))
            comm.all_reduce(private := torch.ones(2))
            other.result(LIMIT_S)
        assert private.tolist() == [2, 2]
        assert cuda.launches() == before


def refusals(cuda: FakeCuda) -> None:
    """Other calls come to Python, which takes them, or explains what is wrong."""
    import torch

    import fastcoll
    from tests.support.fallbacks import refusing

    with two_ranks(cuda) as me:
        comm, tensor, call = me.comm, torch.ones(9), me.comm.all_reduce
        for one in (tensor, torch.ones(10), torch.ones(9, dtype=torch.int32)):  # another kind
            with looked_at():
                call(one)
            with all_known():
                call(one)
        other = torch.ones(9)
        for one in (torch._neg_view(other), torch.ones(9, 2)[:, 0], torch.ones(0)):
            for _ in range(2):
                with looked_at():
                    call(one)
        overlapping = torch.ones(12)
        with looked_at(), raises(fastcoll.UsageError, "overlap in part"):
            call(overlapping[:9], out=overlapping[2:11])
        other.untyped_storage().resize_(8)
        with looked_at(), raises(fastcoll.UsageError, "freed or resized"):
            call(other)
        me.gpu.device = 1
        cuda.put_tensors_on(1)
        with looked_at(), raises(fastcoll.UsageError, "works on cuda:0 here, not on cuda:1"):
            call(tensor)
        me.gpu.device = 0
        cuda.put_tensors_on(0)
        cuda.refuse(True)
        with raises(fastcoll.DriverError, "refused by the fake"), refusing():
            call(tensor)
        cuda.refuse(False)
        with all_known():
            call(tensor)
        with ThreadPoolExecutor(1) as pool:  # the one that launches waits without the GIL
            cuda.fill_queue(True)
            started = pool.submit(call, tensor)
            until(cuda.waits)
            cuda.fill_queue(False)
            started.result(LIMIT_S)
        comm.close()
        with looked_at(), raises(fastcoll.UsageError, "was destroyed"):
            call(tensor)


def carriers(cuda: FakeCuda) -> None:
    """Python takes the calls of carriers, and all calls as long as NCCL's may be late."""
    import torch

    from fastcoll.calls.tensors import Flat
    from fastcoll.native import _C
    from fastcoll.types import Algorithm, DType, Op, Verb

    with two_ranks(cuda) as me:
        comm, side, tensor = me.comm, me.comm.device_group, torch.ones(9)
        plans = {}
        for numel, algorithm, splits in ((21, "nccl", 0), (22, "copy_engine", 0), (23, "ring", 5)):
            fields = Verb.all_reduce, DType.float32, Op.SUM, Algorithm[algorithm]
            plans[algorithm] = _C.Plan(*map(int, fields), numel, 0, 0, False, False, splits, 32)
            comm.cache_gpu_plan(plans[algorithm], False, None)
            with looked_at():
                comm.all_reduce(torch.ones(numel))
        comm.all_reduce(tensor)
        flat = SimpleNamespace(flat=lambda **_: Flat(0, 0, lambda: None))
        carrier = mock.MagicMock(is_late=lambda: False)
        with mock.patch.object(side, "_nccl", carrier):
            carrier.busy.return_value = True
            side._start(plans["nccl"], flat, 1.0, 0)
            for is_busy in (True, True, False):
                carrier.busy.return_value = is_busy
                with looked_at():
                    comm.all_reduce(tensor)
        with all_known():
            comm.all_reduce(tensor)


def symmetric(cuda: FakeCuda) -> None:
    """A use of symmetric memory in a stream is noted before C++ starts such calls."""
    import torch

    def make(comm: Any) -> Any:
        return [comm.empty(8, device="cuda:0") for _ in range(2)]

    with heap_of_floats(), two_ranks(cuda, make) as me:
        comm, (first, second) = me.comm, me.result
        uses = comm.device_group._streams._spans[0].streams
        for tensor in (first, second):
            for stream in (5, 6):
                me.gpu.use(stream)
                with looked_at():
                    comm.all_reduce(tensor)
                assert stream in [one.cuda_stream for one in uses]
                with all_known():
                    comm.all_reduce(tensor)
            uses = comm.device_group._streams._spans[1].streams
        me.gpu.use(7)
        with looked_at():
            comm.all_reduce(torch.ones(8), out=second)
        with all_known():
            comm.all_reduce(second)
        with ThreadPoolExecutor(1) as pool:  # a new tensor may lie where an old one did
            other = pool.submit(make, me.peer)
            make(comm)
            other.result(LIMIT_S)
        with looked_at():
            comm.all_reduce(second)


def ends(cuda: FakeCuda) -> None:
    """A verdict, a lost rank and an aborted group are seen at the next known call."""
    import torch

    import fastcoll
    from fastcoll.gpu.verdicts import DESYNC

    kinds = {
        "kernel": (fastcoll.DesyncError, "rank 1 called all_reduce(SUM, float32, numel=5) by"),
        "host": (fastcoll.AbortedError, "no more"),
        "peer": (fastcoll.PeerLostError, "lost rank 1"),
    }
    for how, (kind, text) in kinds.items():
        with two_ranks(cuda) as me:
            for _ in range(70):  # more than the journal keeps
                me.comm.all_reduce(torch.ones(4))
                me.peer.all_reduce(torch.ones(4))
            me.peer.all_reduce(torch.ones(5))
            with all_known():
                me.comm.all_reduce(tensor := torch.ones(4))
            if how == "kernel":
                words = (ctypes.c_uint32 * 8).from_address(cuda.launched()["host"])
                words[:] = (DESYNC, 0, 1, 0, 72, 7, 8, 0)
            elif how == "host":
                me.comm.abort("no more")
            else:
                me.peer.close()
                until(lambda: me.comm.peer_is_gone(1))
                time.sleep(0.02)  # the peers are not looked at all the time
            before = cuda.launches()
            with looked_at(), raises(kind, text) as told:
                me.comm.all_reduce(tensor)
            assert cuda.launches() == before
            if how == "kernel":
                last = "all_reduce(SUM, float32, numel=4) by"
                assert f"collective 72: rank 0 called {last}" in told[0]
                assert f"Last started here: {last}" in told[0]


def traced(cuda: FakeCuda) -> None:
    """Where a group notes the sites of calls, Python takes all of them."""
    os.environ["FASTCOLL_DEBUG"] = "trace"
    import torch

    with two_ranks(cuda) as me:
        for _ in range(3):
            me.comm.all_reduce(torch.ones(4))
        last = me.comm.device_group._journal.last_call(0)
        assert last.startswith("4, ") and "known_calls.py" in last, last


def timing(cuda: FakeCuda) -> None:
    """Print the host's time of a known call, and of one that comes to Python."""
    import torch

    import fastcoll
    from fastcoll.native import _C

    with two_ranks(cuda) as me:
        tensor, whole, out = torch.ones(1000), torch.ones(2000), torch.ones(2000)
        outs, splits = list(out.chunk(2)), [1000, 1000]
        apart = [torch.ones(1000) for _ in range(2)]
        ops = [fastcoll.P2POp("isend", tensor, 1) for _ in range(2)]
        _C.set_default_group(me.comm)
        ways: dict[str, Callable[[Any], Any]] = {
            "all_reduce": lambda verbs: verbs.all_reduce(tensor),
            "all_reduce, async_op, wait": lambda verbs: verbs.all_reduce(
                tensor, async_op=True
            ).wait(),
            "send": lambda verbs: verbs.send(tensor, 1),
            "isend, wait": lambda verbs: verbs.isend(tensor, 1).wait(),
            "batch of two isends, wait": lambda verbs: [
                work.wait() for work in verbs.batch_isend_irecv(ops)
            ],
            "all_gather of a list": lambda verbs: verbs.all_gather(outs, tensor),
            "all_gather, apart": lambda verbs: verbs.all_gather(apart, tensor),
            "reduce_scatter, apart": lambda verbs: verbs.reduce_scatter(tensor, apart),
            "all_reduce_coalesced of two": lambda verbs: verbs.all_reduce_coalesced(apart),
            "all_to_all_single": lambda verbs: verbs.all_to_all_single(out, whole),
            "all_to_all_single with splits": lambda verbs: verbs.all_to_all_single(
                out, whole, splits, splits
            ),
        }
        for known in (True, False):
            me.comm.use_gpu(me.comm.device_group.known if known else None)
            for name, call in ways.items():
                call(me.comm)
                best, end = 1.0, time.perf_counter() + SECONDS
                while time.perf_counter() < end:
                    start = time.perf_counter()
                    for _ in range(32):
                        call(fastcoll if known else me.comm)
                    best = min(best, (time.perf_counter() - start) / 32)
                    cuda.done_in_streams()
                    me.gpu.kept_for.clear()
                print(f"{name}, {'known' if known else 'by Python'}: {best * 1e6:.2f} us")
        _C.set_default_group(None)


if __name__ == "__main__":
    run_program(globals())
