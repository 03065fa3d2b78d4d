# SPDX-License-Identifier: Apache-2.0
"""Calls of measurements on GPUs, and when graphs are ready; the CPU stands for the kernels."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from fastcoll import native
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks, capture
from fastcoll.measure.gpu_variants import ThreadVariants
from tests.support.gpu import needs_gpu_part
from tests.support.harness import Pools, Rank
from tests.support.sites import group_on_fake_gpu

# ---- in which shape ------------------------------------------------------------------------------

SMALL = 4096  # of float32: what LL packs may carry at most


def launches(rank: Rank) -> tuple[Any, ...]:
    """Return what a floor and an all_reduce in a shape of its own come to; of two ranks."""
    from unittest import mock

    import shapes

    source, out = torch.full((SMALL,), rank.rank + 1.0), torch.zeros(SMALL)
    with (
        group_on_fake_gpu(rank) as (comm, core),
        mock.patch.object(shapes, "_stream", lambda me: 0),
    ):
        me: Any = SimpleNamespace(
            rank=comm.rank, world_size=comm.world_size, comm=comm, device="cpu"
        )
        call = shapes.AllReduce(me, source, out)
        call.floor()()
        asked = (3, 64, 16)
        call.launched(asked)()
        comm.all_reduce(source, out=out)
        plans = [plan for plan in comm.planner.known() if plan.channels]
        return call.shape, core.shapes, core.log, bool((out == 3).all()), len(plans)


@needs_gpu_part
def test_a_floor_exchanges_nothing_in_the_grid_of_its_call(own_pools: Pools) -> None:
    for shape, asked, log, right, num_plans in own_pools(2).run(launches):
        assert shape == (16, 128, 16), "a pack for each thread"
        assert asked == [shape, (3, 64, 16), None]
        names = [(verb, inline) for verb, inline, _ in log]
        assert names == [("all_gather", True), ("all_reduce", True), ("all_reduce", True)]
        assert right
        assert num_plans == 1, "what is measured has the plan of the call"


# ---- when graphs are ready -----------------------------------------------------------------------


class Graph:
    """A captured graph, whose replay needs that every rank has uploaded its own."""

    uploaded: ClassVar[set[int]] = set()
    num_ranks = 3
    capturing = threading.Lock()

    def raw_cuda_graph_exec(self) -> int:
        return id(self)

    def replay(self) -> None:
        assert len(self.uploaded) == self.num_ranks, "a rank's first launch waits for kernels"


@contextlib.contextmanager
def graph(graph: Graph, stream: object, capture_error_mode: str) -> Iterator[None]:
    assert capture_error_mode == "thread_local"
    assert Graph.capturing.acquire(blocking=False), "captures of two threads mix"
    yield
    time.sleep(0.01)
    Graph.capturing.release()


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of rank threads, uploaded in the stream that stands for torch's current one."""
    given: set[int] = set()

    def upload_graph(graph: int, stream: int) -> None:
        assert stream == 7
        given.add(graph)

    def synchronize() -> None:  # an upload is not over before
        Graph.uploaded |= given

    stream = SimpleNamespace(cuda_stream=7, synchronize=synchronize)
    monkeypatch.setattr(Graph, "uploaded", set())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    core = SimpleNamespace(upload_graph=upload_graph)
    monkeypatch.setattr(native, "_cuda", core, raising=False)


def by_variants(me: GpuRank, body: Callable[[], None]) -> Any:
    return ThreadVariants(me).capture(body)


@pytest.mark.parametrize("how", [capture, by_variants], ids=["ranks", "variants"])
def test_no_graph_is_replayed_before_every_rank_has_uploaded_its_own(
    fake_graphs: None, how: Callable[..., Any]
) -> None:
    log: list[int] = []

    def rank_does(me: GpuRank) -> None:
        captured = how(me, lambda: log.append(me.rank))
        captured.replay()

    ranks = GpuRanks(["cpu"] * Graph.num_ranks, timeout_s=20.0)
    try:
        ranks.run(rank_does)
    finally:
        ranks.close()
    assert sorted(log) == list(range(Graph.num_ranks))
