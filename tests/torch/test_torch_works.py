# SPDX-License-Identifier: Apache-2.0
"""The handles that torch.distributed gets of both backends: waiting, asking, letting go."""

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fastcoll
from tests.support.backends import COMPILE_S, on_backend
from tests.support.harness import DEADLINE_S, Attempt, Pool, Rank, attempt
from tests.support.waiting import wait_until, waits

Pools = Callable[[int], Pool]
# Of a call whose plan is known.
HANDLES = ("TorchWork", "NativeWork")
NUMEL = 20  # more bytes than the Python backend keeps of calls that are over


def kinds(rank: Rank) -> dict[str, list[str]]:
    """Whose a verb's second call is, when the first has a plan; and that of another kind."""
    world = rank.world_size
    part, whole, other = torch.ones(4), torch.ones(4 * world), torch.empty(4 * world)
    strided, numbers = torch.ones(4, 2)[:, 0], torch.ones(4, dtype=torch.complex64)
    mine, pieces = whole.chunk(world)[rank.rank], list(other.chunk(world))
    at_root = rank.rank == 1
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(part, async_op=True),
        "broadcast": lambda: dist.broadcast(part, 1, async_op=True),
        "reduce": lambda: dist.reduce(part, 1, async_op=True),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
        "complex": lambda: dist.all_reduce(numbers, async_op=True),
        "all_gather in place": lambda: dist.all_gather_into_tensor(whole, mine, async_op=True),
        "reduce_scatter in place": lambda: dist.reduce_scatter_tensor(mine, whole, async_op=True),
        "all_gather of a list": lambda: dist.all_gather(pieces, part, async_op=True),
        "gather": lambda: dist.gather(part, pieces if at_root else None, 1, async_op=True),
        "scatter": lambda: dist.scatter(part, pieces if at_root else None, 1, async_op=True),
        "reduce_scatter of a list": lambda: dist.reduce_scatter(part, pieces, async_op=True),
        "all_to_all of lists": lambda: dist.all_to_all(
            pieces, list(whole.chunk(world)), async_op=True
        ),
        "all_gather of strided pieces": lambda: dist.all_gather(
            [torch.ones(4, 2)[:, 0] for _ in range(world)], part, async_op=True
        ),
        "strided reduce": lambda: dist.reduce(strided, 1, async_op=True),
        "all_to_all of splits": lambda: dist.all_to_all_single(
            other, whole, [4] * world, [4] * world, async_op=True
        ),
        "all_to_all of rows that can't be shared": lambda: dist.all_to_all_single(
            other.view(1, -1), whole.view(1, -1), async_op=True
        ),
    }
    found = {}
    for name, call in calls.items():
        seen = []
        for _ in range(2):
            try:
                work = call()
                work.wait()
                seen.append(type(work).__name__)
            except fastcoll.UsageError:
                seen.append("UsageError")
        found[name] = seen
    return found


@pytest.mark.native
@pytest.mark.timeout(2 * COMPILE_S)
def test_which_calls_run_in_cpp(compiled_pools: Callable[[int], Pool]) -> None:
    for found in compiled_pools(2).run(on_backend, "fastcoll", kinds):
        python = {"strided reduce", "all_gather of strided pieces"}
        assert found.pop("all_to_all of rows that can't be shared") == ["UsageError"] * 2
        assert found["all_reduce"][0] == "PythonWork"  # as no plan is known; some share one
        assert {name: seen[1] for name, seen in found.items()} == {
            name: "PythonWork" if name in python else "NativeWork" for name in found
        }


def late(rank: Rank) -> list[Any]:
    tensor = torch.ones(4)
    for _ in range(2):
        dist.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
    if rank.rank == 1:
        rank.wait_for("rank 0 waited")
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    seen = attempt(work.wait, timedelta(seconds=0.2 if rank.rank == 0 else 20))
    rank.tell("rank 0 waited")
    return [seen.kind, work.wait(), work.exception()]


def test_waiting_for_less_than_the_call_may_take(backend_pools: Pools) -> None:
    [one, other] = backend_pools(2).run(on_backend, "fastcoll", late)
    assert one == ["CollectiveTimeout", True, None]
    assert other == ["", True, None]


def wait_in_a_handler(rank: Rank) -> list[Any]:
    """A handler waits for the call whose wait its signal interrupted."""
    tensor = torch.ones(4)
    for _ in range(2):
        dist.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
    if rank.rank == 1:
        rank.wait_for("handled")
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    seen, pid = [], os.getpid()

    def handle(_number: int, _frame: object) -> None:
        seen.append(attempt(work.wait).kind)
        rank.tell("handled")

    def send() -> None:
        wait_until(lambda: waits(pid))  # a handler that comes earlier may wait for the call
        os.kill(pid, signal.SIGUSR2)

    if rank.rank == 0:
        signal.signal(signal.SIGUSR2, handle)
        threading.Thread(target=send).start()
    work.wait()
    return [seen, tensor[0].item()]


def test_a_handler_that_waits_for_the_call_behind_it(backend_pools: Pools) -> None:
    [one, other] = backend_pools(2).run(on_backend, "fastcoll", wait_in_a_handler)
    assert one == [["UsageError"], 8.0]
    assert other == [[], 8.0]


def get_on(rank: Rank, how: str) -> list[Any]:
    """A small call that rank 0 has begun gets on however it is asked for, or if nobody asks."""
    dist.all_reduce(torch.ones(NUMEL))
    array = np.ones(NUMEL, np.float32)
    memory, tensor = weakref.ref(array), torch.from_numpy(array)
    if rank.rank == 1:
        rank.wait_for(f"begun, and {how}")
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    facts: list[Any] = [type(work).__name__]
    if how == "asked":
        facts.append(work.is_completed())
    future = work.get_future() if how == "its future" else None
    if how == "let go of":
        del work
    rank.tell(f"begun, and {how}")
    end = time.monotonic() + DEADLINE_S
    while not (work.is_completed() if how == "asked" else tensor[0] == rank.world_size):
        assert time.monotonic() < end, "it did not get on"
        time.sleep(0.001)
    if future is not None:
        facts.append(future.wait()[0].tolist())
    facts.append(tensor.tolist())
    work = future = None
    del tensor, array
    while memory() is not None and time.monotonic() < end:
        time.sleep(0.001)
    return [*facts, memory() is None]


@pytest.mark.parametrize(
    ("how", "first"), [("asked", [False]), ("let go of", []), ("its future", [[2.0] * NUMEL])]
)
def test_what_rests_gets_on(backend_pools: Pools, how: str, first: list[Any]) -> None:
    [one, other] = backend_pools(2).run(on_backend, "fastcoll", get_on, how)
    assert one[0] in HANDLES
    assert one[1:] == [*first, [2.0] * NUMEL, True]
    assert other[-2:] == [[2.0] * NUMEL, True]


def failed_futures(rank: Rank, how: str) -> list[Attempt]:
    """Of a call without a plan, and of one whose plan is known."""
    row = []
    for turn in range(2):
        group, tensor = dist.new_group(), torch.ones(4)
        if turn == 1:
            dist.all_reduce(tensor, group=group)
        op = dist.ReduceOp.MAX if rank.rank else dist.ReduceOp.SUM
        profiled = torch.profiler.profile() if how == "profiled" else contextlib.nullcontext()
        with profiled:
            if how == "batched":
                opts = dist.AllreduceOptions()
                opts.reduceOp, opts.asyncOp = op, True
                group._start_coalescing(torch.device("cpu"))  # type: ignore[union-attr]
                for _ in range(2):
                    group.allreduce([tensor], opts)  # type: ignore[union-attr]
                work = group._end_coalescing(torch.device("cpu"))  # type: ignore[union-attr]
            else:
                work = dist.all_reduce(tensor, op, group=group, async_op=True)
            future = work.get_future()
            chain = future.then(lambda done: done.value())
            row += [attempt(future.wait), attempt(future.wait), attempt(work.wait)]
            row.append(attempt(torch.futures.collect_all([future]).wait))
            chained = attempt(chain.wait)  # a RuntimeError, by torch's C++
            assert "DesyncError" in chained.text or chained.kind == "DesyncError", chained
    return row


@pytest.mark.parametrize("how", ["alone", "batched", "profiled"])
def test_futures_of_calls_that_fail(backend_pools: Pools, how: str) -> None:
    for row in backend_pools(2).run(on_backend, "fastcoll", failed_futures, how):
        for one in row:
            assert one.kind == "DesyncError", one
            assert "MAX" in one.text
            assert "SUM" in one.text


# Of c10d::OpType. By the verb, and whether its Work tells a source.
OP_TYPES = {
    "broadcast": (0, False),
    "all_reduce": (1, False),
    "all_gather_into_tensor": (5, False),
    "scatter": (8, False),
    "barrier": (15, False),
    "isend": (12, True),
    "irecv": (13, True),
    "irecv of any": (14, True),
}


def describe_works(rank: Rank) -> list[dict[str, tuple[int, bool]]]:
    """Return what each verb's Work says of its call, first without a plan, then of a known one."""
    me, world = rank.rank, rank.world_size
    part, whole = torch.ones(4), torch.ones(4 * world)
    before, behind = (me - 1) % world, (me + 1) % world
    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: dist.broadcast(part, 1, async_op=True),
        "all_reduce": lambda: dist.all_reduce(part, async_op=True),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part, async_op=True),
        "scatter": lambda: dist.scatter(
            torch.empty(4), list(whole.chunk(world)) if me == 0 else None, async_op=True
        ),
        "barrier": lambda: dist.barrier(async_op=True),
        "isend": lambda: dist.isend(part, behind),
        "irecv": lambda: dist.irecv(part, before),
        "irecv of any": lambda: dist.irecv(part),
    }
    turns = []
    for _ in range(2):
        found = {}
        for name, call in calls.items():
            if name == "irecv of any":
                dist.isend(torch.ones(4), behind)
            work = call()
            work.wait()
            asked = attempt(work._source_rank)
            assert asked.kind in ("", "RuntimeError"), asked
            found[name] = work._get_op_type(), asked.kind == ""
        turns.append(found)
    return turns


def test_what_a_handle_tells_of_its_call(backend_pools: Pools) -> None:
    for turns in backend_pools(2).run(on_backend, "fastcoll", describe_works):
        assert turns == [OP_TYPES] * 2
