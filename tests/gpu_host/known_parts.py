# SPDX-License-Identifier: Apache-2.0
"""Known calls of every verb, with a part for each rank, and batches, on a CUDA made of the CPU.

`python -m tests.gpu_host.known_parts NAME [EXTENSION]` runs a function of this file.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests.support.fake_cuda import FakeCuda
from tests.support.fake_ranks import (
    LIMIT_S,
    Stream,
    all_known,
    heap_of_floats,
    raises,
    run_program,
    two_ranks,
)

SIDE = Stream().cuda_stream  # that of asynchronous calls


def calls_of(comm: Any, dtype: Any) -> Iterator[Callable[..., Any]]:
    """Calls on rank 0 of two whose parts lie end to end, in one tensor, or apart."""
    import torch

    whole, out = (torch.ones(16, dtype=dtype) for _ in range(2))
    half = torch.ones(8, dtype=dtype)
    parts, outs = list(whole.chunk(2)), list(out.chunk(2))
    yield partial(comm.all_gather, outs, half)
    yield partial(comm.all_gather, tuple(outs), outs[0])
    yield partial(comm.all_gather, list(out.split([5, 11])), half[:5])
    yield partial(comm.reduce_scatter, half, parts)
    yield partial(comm.reduce_scatter, parts[0], parts, op="max", timeout_s=2.5)
    yield partial(comm.all_to_all, outs, parts)
    yield partial(comm.all_to_all, list(out[:8].split([3, 5])), list(whole.split([3, 13])))
    yield partial(comm.all_to_all_single, out, whole)
    yield partial(comm.all_to_all_single, out[:9], whole, [6, 3], [6, 10])
    yield partial(comm.all_to_all_single, out.view(4, 4), whole.view(4, 4), [1, 3], [1, 3])
    apart, others = ([torch.ones(n, dtype=dtype) for n in (8, 8)] for _ in range(2))
    yield partial(comm.all_gather, others, half)
    yield partial(comm.all_gather, outs[::-1], outs[1])
    yield partial(comm.all_gather, [half, whole[3:8]], whole[8:])
    yield partial(comm.reduce_scatter, half, apart)
    yield partial(comm.reduce_scatter, apart[0], apart)
    yield partial(comm.all_to_all, others, apart)
    yield partial(comm.all_to_all, outs, apart)
    yield partial(comm.all_to_all, [half[:3], out[:4]], [apart[1][:3], apart[0]])
    yield partial(comm.gather, half, others, dst=0)
    yield partial(comm.scatter, half, apart, src=0)
    yield partial(comm.gather, half, outs, dst=0)
    yield partial(comm.gather, half, dst=1)
    yield partial(comm.gather_single, half, out, dst=0)
    yield partial(comm.gather_single, half, None, dst=1)
    yield partial(comm.scatter, half, parts, src=0)
    yield partial(comm.scatter, half, src=1)


def plain_calls_of(comm: Any, dtype: Any) -> Iterator[Callable[..., Any]]:
    """Calls on rank 0 of two without parts, some of them in place."""
    import torch

    whole, out = (torch.ones(16, dtype=dtype) for _ in range(2))
    half, part = torch.ones(8, dtype=dtype), whole[:8]
    yield partial(comm.all_reduce, whole)
    yield partial(comm.all_reduce, whole, out=out)
    yield partial(comm.all_reduce, whole[3:], op="max")
    yield partial(comm.all_reduce, whole.view(4, 4), timeout_s=2.5)
    yield partial(comm.all_reduce, whole, numerics="fast", algorithm="two_shot")
    yield partial(comm.reduce, whole, 0)
    yield partial(comm.reduce, whole, 1)
    yield partial(comm.reduce, whole, 0, out=out)
    yield partial(comm.broadcast, whole, 1)
    yield partial(comm.reduce_scatter_tensor, half, whole)
    yield partial(comm.reduce_scatter_tensor, part, whole)
    yield partial(comm.all_gather_into_tensor, whole, half)
    yield partial(comm.all_gather_into_tensor, whole, part)


def compare(
    cuda: FakeCuda, me: Any, call: Callable[..., Any], num_launches: int = 1
) -> tuple[int, int]:
    """C++ launches what Python would, without a Python function.

    Returns:
        How many tensors an asynchronous call keeps for its stream, by Python and by C++.
    """
    call()
    me.comm.use_gpu(None)
    me.gpu.use(5)
    call()
    by_python, before = cuda.launched(), cuda.launches()
    me.gpu.kept_for.clear()
    results = [id(one) for one in call(async_op=True).result()]
    num_kept = len(me.gpu.kept_for)
    me.comm.use_gpu(me.comm.device_group.known)
    me.gpu.use(6)
    with all_known():
        call()
    assert cuda.launches() == before + 2 * num_launches
    assert cuda.launched() == by_python | {"stream": 6}, call
    me.gpu.kept_for.clear()
    with all_known():
        work = call(async_op=True)
    assert cuda.launches() == before + 3 * num_launches
    assert cuda.launched() == by_python | {"stream": SIDE}, call
    assert [id(one) for one in work.result()] == results, call
    return num_kept, len(me.gpu.kept_for)


def verbs(cuda: FakeCuda) -> None:
    """Every verb on one tensor, and on parts."""
    import torch

    with two_ranks(cuda) as me:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for call in plain_calls_of(me.comm, dtype):
                compare(cuda, me, call)  # Python keeps twice what it reduces in place
            for call in calls_of(me.comm, dtype):
                by_python, by_cpp = compare(cuda, me, call)
                assert by_python == by_cpp, call


def lists(cuda: FakeCuda) -> None:
    """C++ launches a call for each tensor of a list, all under one handle."""
    import torch

    import fastcoll
    from tests.support.fallbacks import noting

    with two_ranks(cuda) as me:
        comm = me.comm
        small, large = [torch.ones(8), torch.ones(5)], [torch.ones(16), torch.ones(10)]
        mixed = [torch.ones(8), torch.ones(3, dtype=torch.int32), torch.ones(8)]
        for call, outputs in (
            (partial(comm.all_reduce_coalesced, mixed, op="max"), mixed),
            (partial(comm.all_reduce_coalesced, small, timeout_s=2.5), small),
            (partial(comm.reduce_scatter_tensor_coalesced, small, large), small),
            (partial(comm.all_gather_into_tensor_coalesced, large, small), large),
        ):
            _, num_kept = compare(cuda, me, call, len(outputs))
            assert num_kept >= len(outputs), call
            versions = [one._version for one in outputs]
            with all_known():
                call()
            assert [one._version for one in outputs] == [version + 1 for version in versions]
            cuda.done_in_streams()
            with all_known():
                work = call(async_op=True)
                assert work.wait()
            rows = [row[:2] for row in cuda.done_in_streams()]
            assert rows[:2] == [("record", 6), ("wait", SIDE)]
            assert rows[-2:] == [("record", SIDE), ("wait", 6)]
            assert [id(one) for one in work.result()] == [id(one) for one in outputs]
        before = cuda.launches()
        with noting() as found, raises(fastcoll.UsageError, "tensor 1 of the list"):
            comm.all_gather_into_tensor_coalesced(large, [small[0], torch.ones(3)])
        assert found
        assert cuda.launches() == before, "a part of a wrong list was started"


def program(cuda: FakeCuda) -> None:
    """The writes of a known call are counted; its tensors are read at every call."""
    import torch

    import fastcoll
    from tests.support.fallbacks import noting

    with two_ranks(cuda) as me:
        comm, half, out = me.comm, torch.ones(8), torch.ones(16)
        outs, strided = list(out.chunk(2)), torch.ones(8, 2)[:, 0]
        comm.all_gather(outs, half)
        version = out._version
        with all_known():
            comm.all_gather(outs, half)
        assert out._version == version + 2
        empty = [out[:0], out[4:]], [half[:0], torch.ones(12)]
        for known in (False, True):
            with all_known() if known else contextlib.nullcontext():
                comm.all_to_all(*empty)
        launched = cuda.launched()
        assert (launched["input"], launched["output"]) == (
            empty[1][1].data_ptr(),
            out[4:].data_ptr(),
        )
        assert (launched["to_0"], launched["to_1"], launched["from_0"]) == (0, 12, 0)
        for call in (
            lambda: comm.all_gather(outs, half[:0]),
            lambda: comm.all_gather(outs, half.double()),
            lambda: comm.all_gather(outs, out[4:12]),
            lambda: comm.all_gather([outs[0], strided], half),
            lambda: comm.all_to_all_single(out, torch.ones(16), [8, 8], [9, 9]),
        ):
            for _ in range(2):
                with noting() as found, contextlib.suppress(fastcoll.FastcollError):
                    call()
                assert found, "it was started without a closer look"
        with raises(fastcoll.UsageError, "overlap"):
            comm.all_gather(outs, out[4:12])


def apart(cuda: FakeCuda) -> None:
    """Tensors of a list stay where they are, unless the algorithm needs them end to end."""
    import torch

    import fastcoll
    from fastcoll.native import _C
    from fastcoll.types import Algorithm, DType, Op, Verb
    from tests.support.fallbacks import noting

    with two_ranks(cuda) as me:
        comm, part, lone = me.comm, torch.ones(8), [torch.ones(8) for _ in range(2)]
        places = [one.data_ptr() for one in lone]
        for known in (False, True):
            with all_known() if known else contextlib.nullcontext():
                comm.reduce_scatter(part, lone)
            launched = cuda.launched()
            assert (launched["input"], launched["output"]) == (0, part.data_ptr())
            assert [launched["input_0"], launched["input_1"]] == places
        fields = Verb.reduce_scatter, DType.float32, Op.SUM, Algorithm.chain
        by_chain = _C.Plan(*map(int, fields), 9, 0, 0, False, False, 0, 32)
        comm.cache_gpu_plan(by_chain, False, None)
        nine = torch.ones(9)
        with noting("reduce_scatter") as found:
            comm.reduce_scatter(nine, [torch.ones(9), torch.ones(9)])
        assert found, "it takes no parts that lie apart"
        with all_known():
            comm.reduce_scatter(nine, list(torch.ones(18).chunk(2)))
        assert cuda.launched()["algorithm"] == Algorithm.chain
        core = comm.device_group.core
        with raises(fastcoll.UsageError, "do not fit the plan"):
            core.launch(by_chain, 0, part.data_ptr(), 0, 1.0, [], None, places, [])


def symmetric(cuda: FakeCuda) -> None:
    """The use of every part of symmetric memory is noted before C++ starts such calls."""
    import torch

    from tests.support.fallbacks import noting

    def make(comm: Any) -> Any:
        return comm.empty(8, device="cuda:0")

    with heap_of_floats(), two_ranks(cuda, make) as me:
        comm, own = me.comm, torch.ones(4)
        first, second = me.result.chunk(2)
        for stream in (5, 6):
            me.gpu.use(stream)
            comm.all_reduce(first)
            with noting("all_gather") as found:
                comm.all_gather([first, second], own)
            assert found, "the second part was not looked at"
            with all_known():
                comm.all_gather([first, second], own)


def batches(cuda: FakeCuda) -> None:
    """C++ starts the kernels of a batch, and notes the messages as Python would."""
    import torch

    from fastcoll import P2POp

    def ops_of(comm: Any, to: list[Any], by: list[Any]) -> list[P2POp]:
        peer = 1 - comm.rank
        ops = [P2POp("irecv", by[0], peer, tag=5), P2POp(comm.isend, to[0], peer, tag=5)]
        return [*ops, P2POp("isend", to[1], peer), P2POp("irecv", by[1], peer)]

    with two_ranks(cuda) as me, ThreadPoolExecutor(1) as pool:
        me.gpu.use(5)
        started = []
        for known in (False, True):
            for one in (me.comm, me.peer):
                one.use_gpu(one.device_group.known if known else None)
            to = [torch.arange(5.0), torch.arange(7, 14)]
            by = [torch.zeros(5), torch.zeros(7, dtype=torch.int64)]
            its = [one.clone() for one in by]
            versions = [one._version for one in by]
            cuda.done_in_streams()
            ops, others = ops_of(me.comm, to, by), ops_of(me.peer, [one + 1 for one in to], its)
            other = pool.submit(me.peer.batch_isend_irecv, others)
            with all_known() if known else contextlib.nullcontext():
                works = me.comm.batch_isend_irecv(ops)
                for work in works:
                    assert work.wait()
            other.result(LIMIT_S)
            assert [one._version for one in by] == [version + 1 for version in versions]
            assert all(one.equal(it + 1) for one, it in zip(by, to, strict=True))
            assert all(one.equal(it) for one, it in zip(its, to, strict=True))
            rows = cuda.done_in_streams()
            assert [row[1] for row in rows if row[0] == "launch"] == [SIDE] * 4
            if known:  # each rank's streams follow the program's
                assert [row[:2] for row in rows].count(("record", 5)) == 2
            assert [work.source_rank() for work in works] == [1] * 4
            assert [id(work.result()[0]) for work in works] == [id(by[0]), *map(id, to), id(by[1])]
            started.append(me.comm.device_group._journal.core.started())
        assert started[0] == started[1]
        assert started[0].count("(int64, numel=7, tag=0)") == 2, started[0]
        assert len({row[2] for row in rows if row[0] == "record" and row[1] == SIDE}) >= 2


def batches_by_python(cuda: FakeCuda) -> None:
    """Python takes a batch that needs a closer look; then C++ has started nothing."""
    import torch

    import fastcoll
    from fastcoll import P2POp
    from tests.support.fallbacks import noting

    with two_ranks(cuda) as me:
        comm, one = me.comm, torch.ones(4)
        good = P2POp("isend", one, 1)
        for bad in (
            P2POp("isend", one[:0], 1),
            P2POp("isend", torch.ones(4, 2)[:, 0], 1),
            P2POp("isend", one, 0),
            P2POp("irecv", one),
            P2POp("isend", one, 2),
            P2POp("isend", one, 1, tag=-1),
            P2POp("isend", one, 1, group=comm),
        ):
            cuda.done_in_streams()
            with noting("batch_isend_irecv") as found, contextlib.suppress(fastcoll.FastcollError):
                comm.batch_isend_irecv([good, bad])
            assert found, bad
        cuda.done_in_streams()
        with raises(fastcoll.UsageError, "dst=2 is not a rank"):
            comm.batch_isend_irecv([good, P2POp("isend", one, 2)])
        assert cuda.done_in_streams() == []


if __name__ == "__main__":
    run_program(globals())
