# SPDX-License-Identifier: Apache-2.0
"""Captured calls: replayed many times, several graphs, mixed with calls that are not captured."""

from collections.abc import Callable

import torch

from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks, capture
from tests.gpu.work import bits, numbers

Threads = Callable[[int], GpuRanks]
NUMELS = (100, 50_000)


def replay_mixed(me: GpuRank) -> list[str]:
    """Two graphs and an eager call, in turn, with fresh data each time."""
    tensors = [torch.zeros(numel, device=me.device) for numel in NUMELS]
    outputs = [torch.zeros_like(tensor) for tensor in tensors]
    eager = torch.zeros(777, device=me.device)
    # Copied to the device beforehand: a copy from ordinary memory may wait for all kernels.
    rounds = 6
    fresh = [
        [numbers(100 * turn + me.rank, tensor.numel()) for tensor in (*tensors, eager)]
        for turn in range(rounds)
    ]
    on_device = [[tensor.to(me.device) for tensor in row] for row in fresh]
    results: list[list[torch.Tensor]] = [
        [torch.empty_like(tensor) for tensor in row] for row in on_device
    ]
    graphs = [
        capture(me, lambda t=tensor, o=output: [me.comm.all_reduce(t, out=o) for _ in range(3)])
        for tensor, output in zip(tensors, outputs, strict=True)
    ]
    me.synchronize()
    me.comm.barrier()
    for row, kept in zip(on_device, results, strict=True):
        for tensor, graph, output, source, keep in zip(
            tensors, graphs, outputs, row, kept, strict=False
        ):
            tensor.copy_(source)
            output.fill_(float("nan"))
            graph.replay()
            keep.copy_(output)
        eager.copy_(row[-1])
        me.comm.all_reduce(eager)
        kept[-1].copy_(eager)
    me.synchronize()
    me.comm.check()
    problems = []
    for turn, (row, kept) in enumerate(zip(fresh, results, strict=True)):
        for index, (given, got) in enumerate(zip(row, kept, strict=True)):
            wanted = given.clone()
            me.comm.all_reduce(wanted)
            if not torch.equal(bits(got), bits(wanted)):
                problems.append(f"rank {me.rank}: turn {turn}, call {index} is wrong")
    return problems


def test_graphs_replay_with_fresh_data_between_eager_calls(threads: Threads) -> None:
    for world in (2, 4):
        problems = [text for texts in threads(world).run(replay_mixed) for text in texts]
        assert not problems, "\n".join(problems[:8])


def many_replays(me: GpuRank) -> float:
    """Averages of the averages: a replay that computes on half-old data shows in the sum."""
    tensor = torch.full((4096,), float(me.rank), device=me.device)
    graph = capture(me, lambda: me.comm.all_reduce(tensor))
    tensor.fill_(float(me.rank))
    me.synchronize()
    me.comm.barrier()
    for _ in range(10):
        graph.replay()
    me.synchronize()
    me.comm.check()
    assert bool((tensor == tensor[0]).all())
    return float(tensor[0])


def test_a_graph_is_replayed_many_times(threads: Threads) -> None:
    # The sum of 0..3, then 4 times itself in each of the nine further replays: exact in float32.
    assert threads(4).run(many_replays) == [6.0 * 4**9] * 4
