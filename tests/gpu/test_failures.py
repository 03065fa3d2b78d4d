# SPDX-License-Identifier: Apache-2.0
"""Every fault on a GPU becomes one clear error on every rank, within the limit."""

import time
from collections.abc import Callable

import pytest
import torch

from fastcoll.errors import CollectiveTimeout, DesyncError, FastcollError, UsageError
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks

Fresh = Callable[[int, float], GpuRanks]
LIMIT_S = 2.0


def miss(
    me: GpuRank, missing: int, numel: int = 5000, algorithm: str = "auto"
) -> tuple[str, tuple[int, ...], float, bool, float]:
    """Every rank but one calls; what it gets, after how long; then a hundred calls more."""
    tensor = torch.ones(numel, device=me.device)
    me.comm.all_reduce(tensor, algorithm=algorithm)  # from here on it needs nothing of the driver
    me.synchronize()
    me.comm.barrier()
    start = time.monotonic()
    if me.rank == missing:
        time.sleep(2 * LIMIT_S)
        return "", (), 0.0, True, 0.0
    me.comm.all_reduce(tensor, algorithm=algorithm)
    me.synchronize()
    took_s = time.monotonic() - start
    with pytest.raises(CollectiveTimeout) as caught:
        me.comm.check()
    all_nan = bool(tensor.isnan().all())
    start = time.monotonic()
    for _ in range(100):
        with pytest.raises(FastcollError):
            me.comm.all_reduce(tensor, algorithm=algorithm)
    me.synchronize()
    return str(caught.value), caught.value.ranks, took_s, all_nan, time.monotonic() - start


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_comes_is_named(fresh_threads: Fresh, missing: int) -> None:
    results = fresh_threads(3, LIMIT_S).run(miss, missing)
    for rank, (text, ranks, took_s, all_nan, drained_s) in enumerate(results):
        if rank == missing:
            continue
        assert ranks == (missing,), text
        assert f"rank {missing}" in text
        assert LIMIT_S * 0.9 < took_s < LIMIT_S * 1.5
        assert all_nan
        assert drained_s < LIMIT_S * 1.2


def replay_alone(me: GpuRank) -> tuple[float, str]:
    """Rank 0 replays a hundred collectives that rank 1 does not join."""
    tensor = torch.ones(256, device=me.device)
    graph = torch.cuda.CUDAGraph()
    if me.rank == 0:
        with torch.cuda.graph(graph, stream=me.stream, capture_error_mode="thread_local"):
            for _ in range(100):
                me.comm.all_reduce(tensor)
    me.comm.barrier()
    if me.rank != 0:
        time.sleep(2 * LIMIT_S)
        return 0.0, ""
    start = time.monotonic()
    graph.replay()
    me.synchronize()
    took_s = time.monotonic() - start
    with pytest.raises(CollectiveTimeout) as caught:
        me.comm.check()
    return took_s, str(caught.value)


def test_a_replay_with_a_dead_peer_drains_at_once(fresh_threads: Fresh) -> None:
    took_s, text = fresh_threads(2, LIMIT_S).run(replay_alone)[0]
    assert took_s < 1.2 * LIMIT_S
    assert "rank 1" in text


def call_twice_at_once(me: GpuRank) -> str:
    """Rank 0 replays a call in another stream while it waits in one for rank 1."""
    tensor, other = (torch.ones(5000, device=me.device) for _ in range(2))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(me.device)
    if me.rank == 0:
        with torch.cuda.graph(graph, stream=me.stream, capture_error_mode="thread_local"):
            me.comm.all_reduce(other)
        graph.replay()
    else:
        me.comm.all_reduce(other)
    me.synchronize()
    me.comm.barrier()
    if me.rank == 0:
        me.comm.all_reduce(tensor)
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()  # it finds the other call, and ends
        me.synchronize()
    else:
        time.sleep(LIMIT_S / 2)
    with pytest.raises(UsageError) as caught:
        me.comm.all_reduce(tensor)
        me.synchronize()
        me.comm.check()
    return str(caught.value)


def test_a_replay_beside_another_call_is_told_to_all(fresh_threads: Fresh) -> None:
    for rank, text in enumerate(fresh_threads(2, LIMIT_S).run(call_twice_at_once)):
        assert ("this rank" if rank == 0 else "rank 0") + " was in two calls" in text
        assert "does not wait for the other" in text


def differ(me: GpuRank, what: str) -> str:
    numel = 1000 + (me.rank if what == "size" else 0)
    dtype = torch.float64 if what == "dtype" and me.rank else torch.float32
    tensor = torch.ones(numel, dtype=dtype, device=me.device)
    algorithm = "two_shot" if what == "algorithm" and me.rank else "one_shot"
    me.synchronize()
    me.comm.barrier()
    me.comm.all_reduce(tensor, algorithm=algorithm)
    me.synchronize()
    time.sleep(0.5)  # until both sides know
    with pytest.raises(DesyncError) as caught:
        me.comm.check()
    return str(caught.value)


@pytest.mark.parametrize("what", ["size", "dtype", "algorithm"])
def test_different_calls_are_told_apart(fresh_threads: Fresh, what: str) -> None:
    texts = fresh_threads(2, 20.0).run(differ, what)
    assert all("called something else" in text for text in texts)
    assert texts[0] == texts[1], "one verdict for all"
    assert all(f"rank {rank} called all_reduce" in texts[0] for rank in range(2)), texts[0]


def send_alone(me: GpuRank, what: str) -> tuple[str, str]:
    """Rank 0 sends what rank 1 does not receive, or expects of another size."""
    tensor = torch.ones(1 << 20, device=me.device)
    me.synchronize()
    me.comm.barrier()
    if me.rank == 0:
        me.comm.send(tensor, 1)
    elif what == "another size":
        me.comm.recv(tensor[1:], 0)
    me.synchronize()
    if me.rank and what == "nobody":
        time.sleep(2 * LIMIT_S)
    with pytest.raises(FastcollError) as caught:
        me.comm.check()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("what", "kind"), [("nobody", "CollectiveTimeout"), ("another size", "DesyncError")]
)
def test_a_send_without_its_receive_ends_on_both_sides(
    fresh_threads: Fresh, what: str, kind: str
) -> None:
    for name, text in fresh_threads(2, LIMIT_S).run(send_alone, what):
        assert name == kind, text
        assert "rank 1" in text or "rank 0" in text
        if kind == "DesyncError":
            assert "message 1 from rank 0 to rank 1: sent is float32, numel=1048576" in text


def first_in_capture(me: GpuRank) -> None:
    comm = me.comm.new_group()
    tensor = torch.ones(10, device=me.device)
    if me.rank == 0:
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(UsageError, match="one call before the capture"),
            torch.cuda.graph(graph, stream=me.stream, capture_error_mode="thread_local"),
        ):
            comm.all_reduce(tensor)
    me.comm.barrier()
    comm.close()


def bad_arguments(me: GpuRank) -> None:
    on_gpu, on_cpu = torch.ones(4, device=me.device), torch.ones(4)
    with pytest.raises(UsageError, match=r"tensor is on cuda:0 and out on the CPU"):
        me.comm.all_reduce(on_gpu, out=on_cpu)
    if torch.cuda.device_count() > 1:
        with pytest.raises(UsageError, match="a rank has one GPU"):
            me.comm.all_reduce(torch.ones(4, device="cuda:1"))
    me.comm.all_reduce(on_gpu)
    me.synchronize()
    assert float(on_gpu[0]) == me.world_size, "the group is as usable as before"


@pytest.mark.parametrize("program", [first_in_capture, bad_arguments])
def test_what_is_refused_leaves_the_group_usable(
    fresh_threads: Fresh, program: Callable[..., None]
) -> None:
    fresh_threads(2, 10.0).run(program)
