# SPDX-License-Identifier: Apache-2.0
"""A few small calls by two ranks as threads, for compute-sanitizer."""

import torch
from shapes import AllReduce, there_and_back

from fastcoll import env
from fastcoll.calls.batches import P2POp
from fastcoll.measure.gpu_ranks import GpuRank, GpuRanks


def calls(me: GpuRank) -> None:
    world = me.world_size
    whole, part = torch.ones(4 * world, device=me.device), torch.ones(4, device=me.device)
    large = torch.ones(20_000, device=me.device)
    got, given = torch.empty_like(large), whole.clone()
    me.synchronize()
    me.comm.barrier()
    for algorithm in ("one_shot", "two_shot"):
        me.comm.all_reduce(large, algorithm=algorithm)
    me.comm.all_reduce(part)
    me.comm.reduce_scatter_tensor(part, whole)
    me.comm.all_gather_into_tensor(whole, part)
    me.comm.broadcast(part, 1)
    me.comm.all_to_all_single(whole, given, [4] * world, [4] * world)
    other = 1 - me.rank
    for work in me.comm.batch_isend_irecv(
        [P2POp("isend", large, other), P2POp("irecv", got, other)]
    ):
        work.wait()
    # The calls of the benchmarks alone.
    AllReduce(me, large, got, "two_shot").launched((2, 512, 1024))()
    AllReduce(me, part, part).floor()()
    there_and_back(me, "ll_pack", 10, 1 << 40)
    me.synchronize()
    me.comm.check()


if __name__ == "__main__":
    env.prepare_gpu_threads()
    ranks = GpuRanks(["cuda:0"] * 2, timeout_s=12.0)
    ranks.run(calls)
    ranks.close()
    print("ok")
