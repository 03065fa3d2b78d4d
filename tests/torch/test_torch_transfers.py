# SPDX-License-Identifier: Apache-2.0
"""Transfers of torch.distributed that fail, and those that only torch's groups have.

Transfers that succeed stand in contract/test_p2p.py, for every kind of group.
"""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastcoll.api.groups import communicator_of
from fastcoll.integrations.torch_group import FastcollProcessGroup
from tests.support.backends import BACKENDS, COMPILE_S, on_backend, same
from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt
from tests.support.held import no_threads

Pools = Callable[[int], Pool]
LARGE = 1 << 20  # more than a sender can put down without its receiver


def any_source(rank: Rank) -> list[Any]:
    """Receive from any source, in a group whose ranks have other names in the world."""
    me, last = rank.rank, rank.world_size - 1
    group = dist.new_group([1, 0] if last == 1 else [last, 1])
    results = []
    if me == last:
        expected = {}
        for tag in (7, 5):
            tensor = torch.empty(2)
            source = dist.recv(tensor, group=group, tag=tag)
            expected[tag] = (source, tensor)
        work = dist.irecv(torch.empty(2), group=group)
        work.wait()
        results = [expected[5], expected[7], work._source_rank()]
    elif me in dist.get_process_group_ranks(group):
        for work in [
            dist.isend(torch.full((2,), float(tag)), last, group, tag) for tag in (5, 7, 0)
        ]:
            assert work is not None
            work.wait()
    dist.barrier()
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_of_a_group_as_on_gloo(backend_pools: Pools, world: int) -> None:
    ours = backend_pools(world).run(on_backend, "fastcoll", any_source)
    assert same(ours, backend_pools(world).run(on_backend, "gloo", any_source))


def wrong_by_itself(rank: Rank) -> list[Attempt]:
    """Make transfers that are refused before a byte is sent; the group goes on."""
    peer, group = 1 - rank.rank, dist.group.WORLD
    assert group is not None
    tensor = torch.ones(4)
    seen = [
        attempt(dist.isend, tensor, peer, tag=-1),
        attempt(group.send, [tensor], 2, 0),
        attempt(group.recv, [tensor], -1, 0),
        attempt(dist.irecv, torch.ones(1).expand(4), peer),
    ]
    works = [dist.isend(tensor * rank.rank, peer), dist.irecv(tensor, peer)]
    for work in works:
        assert work is not None
        work.wait()
    assert tensor[0] == peer
    return seen


def test_wrong_transfers_are_refused_and_do_no_harm(backend_pools: Pools) -> None:
    for row in backend_pools(2).run(on_backend, "fastcoll", wrong_by_itself):
        for word, one in zip(("tag=-1", "dst=2", "src=-1", "expanded"), row, strict=True):
            assert one.kind == "UsageError", one
            assert word in one.text, one


def other_types(rank: Rank) -> list[Attempt]:
    """Receive another dtype than is sent: a waiting rank gets the error from every question."""
    peer, group = 1 - rank.rank, dist.new_group()
    if rank.rank == 0:
        work = dist.isend(torch.ones(LARGE), peer, group)
    else:
        work = dist.irecv(torch.ones(LARGE, dtype=torch.int32), peer, group)
    assert work is not None
    seen = [attempt(work.wait), attempt(work.wait), attempt(work.result)]
    future = work.get_future()
    seen += [attempt(future.wait), attempt(future.wait)]
    error = work.exception()
    assert work.is_completed()
    assert not work.is_success()
    seen.append(Attempt(type(error).__name__, str(error), 0))
    seen += [attempt(dist.isend, torch.ones(1), peer, group), attempt(dist.barrier, group)]
    dist.barrier()  # no rank leaves before
    return seen


def test_errors_keep_their_type(backend_pools: Pools) -> None:
    for row in backend_pools(2).run(on_backend, "fastcoll", other_types):
        for one in row:
            assert one.kind == "DesyncError", one
            assert "float32 to rank 1, which receives" in one.text
            assert "int32" in one.text
            assert one.seconds < LATE_S, one


def left_open(rank: Rank) -> list[Attempt]:
    """Destroy a group with an open receive, whose handle keeps the parts that it needs."""
    group = dist.new_group()
    comm = weakref.ref(communicator_of(group))  # type: ignore[arg-type]
    work = dist.irecv(torch.ones(4), rank.rank, group)  # from itself, which does not leave earlier
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    assert work is not None
    seen = [attempt(work.wait), attempt(work.wait)]
    gc.collect()
    assert comm() is not None
    del work
    end = time.monotonic() + LATE_S
    while comm() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert comm() is None
    return seen


def test_a_group_may_end_under_a_receive(backend_pools: Pools) -> None:
    for row in backend_pools(2).run(on_backend, "fastcoll", left_open):
        for one in row:
            assert one.kind == "UsageError", one
            assert "destroyed before the transfer was complete" in one.text
            assert one.seconds < LATE_S, one


def goes_on_after(rank: Rank) -> list[float]:
    """A batch of transfers, then a list of calls, in each of which something raises."""
    peer, sums = 1 - rank.rank, []
    tensor = torch.ones(4)
    ops = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.isend, tensor, peer, tag=-1)]
    assert attempt(dist.batch_isend_irecv, ops).kind
    dist.recv(torch.zeros(4), peer)
    for _ in range(2):
        dist.all_reduce(total := torch.full((4,), rank.rank + 1.0))
        sums.append(total.sum().item())
        with contextlib.suppress(ZeroDivisionError), dist._coalescing_manager():
            dist.all_reduce(torch.ones(4))
            raise ZeroDivisionError
    return sums


def test_calls_after_a_batch_that_failed(backend_pools: Pools) -> None:
    assert backend_pools(2).run(on_backend, "fastcoll", goes_on_after) == [[12.0, 12.0]] * 2


def lets_go_after(rank: Rank) -> list[bool]:
    """A batch that the program breaks off, and a call whose tensor nobody holds any more."""
    cpu = torch.device("cpu")
    with contextlib.suppress(ZeroDivisionError), dist._coalescing_manager(device=cpu):
        raise ZeroDivisionError
    gone = []
    for _ in range(2):  # the second one is known
        dist.all_reduce(tensor := torch.ones(1000))
        seen = weakref.ref(tensor)
        del tensor
        gc.collect()
        gone.append(seen() is None)
    return gone


def test_a_batch_that_breaks_off_keeps_no_later_tensor(backend_pools: Pools) -> None:
    assert backend_pools(2).run(on_backend, "fastcoll", lets_go_after) == [[True, True]] * 2


def batches_beside(rank: Rank, other: str) -> list[int]:
    """Count the right results of batches in one thread, and of calls in another one."""
    peer, start = 1 - rank.rank, threading.Barrier(2)

    def batches(tag: int) -> int:
        start.wait()
        right = 0
        for number in range(100):
            sent, got = torch.full((9,), rank.rank + 10.0 * number + tag), torch.zeros(9)
            ops = [
                dist.P2POp(dist.isend, sent, peer, tag=tag),
                dist.P2POp(dist.irecv, got, peer, tag=tag),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            right += got.tolist() == [peer + 10.0 * number + tag] * 9
        return right

    def sums() -> int:
        start.wait()
        right = 0
        for number in range(100):
            dist.all_reduce(total := torch.full((9,), float(number)))
            right += total.tolist() == [2.0 * number] * 9
        return right

    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(batches, 1)]
        runs.append(threads.submit(sums) if other == "sums" else threads.submit(batches, 2))
        return [run.result() for run in runs]


@pytest.mark.parametrize("other", ["sums", "batches"])
def test_batches_of_a_thread_are_its_own(backend_pools: Pools, other: str) -> None:
    found = backend_pools(2).run(on_backend, "fastcoll", batches_beside, other)
    assert found == [[100, 100]] * 2


@pytest.mark.parametrize("other", ["sums", "batches"])
def test_batches_between_nodes_are_a_threads_own(
    fresh_pool: Callable[[int, Setup], Pool], other: str
) -> None:
    pool = fresh_pool(2, Setup(init=False, nodes="ab"))
    assert pool.run(on_backend, "fastcoll", batches_beside, other) == [[100, 100]] * 2


# ---- the compiled backend alone ------------------------------------------------------------------


def without_python(rank: Rank) -> list[Any]:
    """Transfers where Python's part of the backend would fail, and one that needs it."""

    def fails(*_: object) -> None:
        raise AssertionError("went through Python")

    peer, taken = 1 - rank.rank, torch.zeros(4)
    names = ("send", "recv", "recv_anysource", "_start_coalescing", "_end_coalescing")
    kept = {name: getattr(FastcollProcessGroup, name) for name in names}
    for name in names:
        setattr(FastcollProcessGroup, name, fails)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            work = dist.isend(torch.ones(4), peer)
            assert dist.recv(taken) == peer
            with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as batch:
                dist.isend(taken + 1, peer)
                dist.irecv(taken, peer)
            batch.wait()
            assert work is not None
            work.wait()
        strided = attempt(dist.isend, torch.ones(4, 2)[:, 0], peer)
    finally:
        for name, method in kept.items():
            setattr(FastcollProcessGroup, name, method)
    events = {event.name for event in trace.events() if event.name.startswith("fastcoll:")}
    return [taken.tolist(), events, strided.text]


@pytest.mark.native
@pytest.mark.timeout(2 * COMPILE_S)
def test_what_is_plain_goes_past_python(compiled_pools: Pools) -> None:
    for taken, events, strided in compiled_pools(2).run(on_backend, "fastcoll", without_python):
        assert taken == [2.0] * 4
        assert events == {"fastcoll:send", "fastcoll:recv", "fastcoll:coalesced"}
        assert strided == "went through Python"


def batch_fails(rank: Rank) -> list[Any]:
    """torch does not end a batch in which a call raises: what comes later is no part of it."""
    peer, group, cpu = 1 - rank.rank, dist.group.WORLD, torch.device("cpu")
    assert group is not None
    tensor, total = torch.ones(4), torch.full((4,), float(rank.rank))

    def send_two() -> None:  # batch_isend_irecv makes a batch only where there are GPUs
        with dist._coalescing_manager(device=cpu, async_ops=True):
            dist.isend(tensor, peer)
            dist.isend(tensor, peer, tag=-1)

    seen = attempt(send_two)
    assert seen.kind == "UsageError", seen
    assert seen.seconds < LATE_S
    dist.recv(tensor, peer)
    dist.broadcast(total, 0)
    return [total.tolist(), group._end_coalescing(cpu).result()]


@pytest.mark.native
@pytest.mark.timeout(2 * COMPILE_S)
def test_a_batch_that_fails_is_over(compiled_pools: Pools) -> None:
    rows = compiled_pools(2).run(on_backend, "fastcoll", batch_fails)
    assert rows == [[[0.0] * 4, []]] * 2


def without_threads(rank: Rank) -> list[float]:
    """Messages that are not over at once, and a batch of them: the waits move them."""
    peer = 1 - rank.rank
    sent, got = torch.full((LARGE,), rank.rank + 1.0), torch.zeros(LARGE)
    small, others = torch.zeros(3), torch.full((3,), rank.rank + 5.0)
    dist.barrier()
    with no_threads():
        for received, given in ((got, sent), (small, others)):
            works = [dist.irecv(received, peer), dist.isend(given, peer)]
            for work in works:
                assert work is not None
                work.wait()
        ops = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.barrier()
    return [got.sum().item(), small.sum().item()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_transfers_need_no_thread(fresh_pool: Callable[..., Pool], backend: str) -> None:
    pool = fresh_pool(2, Setup(init=False, env={"FASTCOLL_TORCH_BACKEND": backend}))
    found = pool.run(on_backend, "fastcoll", without_threads, deadline_s=COMPILE_S)
    assert found == [[2.0 * LARGE, 18.0], [1.0 * LARGE, 15.0]]
