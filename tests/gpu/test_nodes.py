# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors over several nodes, which FASTCOLL_NODE_ID makes of one machine: NCCL in between.

A lane has a rank of each node, and NCCL wants a GPU for each of its ranks. So the tests need two
GPUs, or an NCCL that lets ranks share one (2.30, NCCL_MULTI_RANK_GPU_ENABLE=1).
"""

from collections.abc import Callable

import pytest
import torch

from fastcoll.machine import gpu
from tests.contract.test_gpu_parts import gathers, shuffles
from tests.gpu.work import check_processes, exchange_in_process, on_device
from tests.support import harness
from tests.support.calls import ROOTED
from tests.support.draw import VERBS
from tests.support.gpu import as_gpu_rank

FreshPool = Callable[..., harness.Pool]


def maps() -> list[str]:
    num_gpus = torch.cuda.device_count()
    if num_gpus >= 4 or gpu.nccl_name().endswith(gpu.NCCL_SHARES):
        return ["aabb", "aaab"]
    return ["ab"] if num_gpus >= 2 and gpu.nccl_version() else []


pytestmark = pytest.mark.skipif(
    not maps(),
    reason="not run: NCCL has no two GPUs here, nor lets ranks share one "
    "(2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1)",
)


@pytest.mark.parametrize("nodes", maps())
def test_nodes_get_the_cpus_bits(fresh_pool: FreshPool, nodes: str) -> None:
    pool = fresh_pool(len(nodes), harness.Setup(nodes=nodes))
    calls = [
        on_device(verb, dtype, numel, seed=numel, root=len(nodes) - 1 if verb in ROOTED else 0)
        for verb in VERBS
        for dtype in ("float32", "int64")
        for numel in (1, 70_000)
    ]
    calls.append(on_device("all_reduce", "float32", 5 << 20))
    check_processes(pool, calls, nodes)
    kinds = [(numel, dtype) for numel in (1, 10_000) for dtype in ("float32", "int64")]
    for problems, _ in pool.run(exchange_in_process, kinds, shuffles, gathers):
        assert not problems, "\n".join(problems[:8])


def captured(rank: harness.Rank) -> list[float]:
    me = as_gpu_rank(rank)
    ones = torch.ones(70_000, device=me.device)
    out = torch.zeros_like(ones)
    rank.comm.all_reduce(ones, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        rank.comm.all_reduce(ones, out=out)
    found = []
    for turn in range(1, 4):
        ones.fill_(turn)
        graph.replay()
        torch.cuda.synchronize()
        found.append(float(out.mean()))
    rank.comm.check()
    return found


@pytest.mark.parametrize("nodes", maps())
def test_a_call_over_nodes_can_be_captured(fresh_pool: FreshPool, nodes: str) -> None:
    pool = fresh_pool(len(nodes), harness.Setup(nodes=nodes))
    for found in pool.run(captured, deadline_s=120):
        assert found == [len(nodes) * turn for turn in (1, 2, 3)]
