# SPDX-License-Identifier: Apache-2.0
"""Sends and receives of CUDA tensors over nodes, which FASTCOLL_NODE_ID makes of one machine.

They go through the host: one GPU for all ranks will do, and NCCL is not asked. Not yet run on one.
"""

from collections.abc import Callable

import pytest
import torch

from fastcoll.calls.batches import P2POp
from fastcoll.nodes.transfers.payloads import PIECE_BYTES
from tests.support import harness
from tests.support.gpu import as_gpu_rank

FreshPool = Callable[..., harness.Pool]
SLEEP_CYCLES = 100_000_000  # some 50 ms
NUMEL = 5 * PIECE_BYTES // 8 + 3  # of floats: several pieces, the last one not whole


def numbers(source: int, target: int, numel: int, device: torch.device) -> torch.Tensor:
    found = torch.arange(numel, dtype=torch.float32, device=device)
    return found * (1 + source) + target


def exchange(rank: harness.Rank) -> None:
    """A late stream writes the tensors that are sent, and reads those that are overwritten."""
    me, world, comm = as_gpu_rank(rank), rank.world_size, rank.comm
    others = [peer for peer in range(world) if peer != me.rank]
    for numel in (0, 1, 1000, NUMEL):
        given = {peer: torch.zeros(numel, device=me.device) for peer in others}
        got = {peer: torch.full((2 * numel,), -1.0, device=me.device)[::2] for peer in others}
        torch.cuda._sleep(SLEEP_CYCLES)
        kept = {peer: tensor.clone() for peer, tensor in got.items()}
        for peer, tensor in given.items():
            tensor.copy_(numbers(me.rank, peer, numel, me.device))
        ops = [P2POp("irecv", tensor, peer) for peer, tensor in got.items()]
        ops += [P2POp("isend", tensor, peer) for peer, tensor in given.items()]
        works = comm.batch_isend_irecv(ops)
        for work in works:
            work.wait()
            work.get_future().wait()
        for peer in others:
            assert torch.equal(got[peer], numbers(peer, me.rank, numel, me.device))
            assert (kept[peer] == -1).all()
    assert comm._gpus is None, "neither NCCL nor kernels are needed"


@pytest.mark.parametrize("nodes", ["ab", "aab"])
def test_everybody_to_everybody(fresh_pool: FreshPool, nodes: str) -> None:
    fresh_pool(len(nodes), harness.Setup(nodes=nodes)).run(exchange, deadline_s=120)


def mixed(rank: harness.Rank) -> str:
    """To and from the CPU's memory; a capture; a message that does not fit."""
    me, comm, peer = as_gpu_rank(rank), rank.comm, 1 - rank.rank
    for sender in (0, 1):
        tensor = torch.arange(5000.0)
        if rank.rank == sender:
            comm.send(tensor.to(me.device), peer)
        else:
            out = torch.zeros(5000)
            assert comm.recv(out) == peer
            assert torch.equal(out, tensor)
            comm.send(out, peer)
        if rank.rank == sender:
            back = torch.zeros(5000, device=me.device)
            comm.recv(back, peer)
            assert torch.equal(back.cpu(), tensor)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        refused = harness.attempt(comm.isend, torch.ones(3, device=me.device), peer)
    assert "can't be captured" in refused.text, refused
    call = (comm.send, comm.recv)[rank.rank]
    return harness.attempt(call, torch.ones(400 + rank.rank, device=me.device), peer).kind


def test_the_cpus_memory_takes_part(fresh_pool: FreshPool) -> None:
    found = fresh_pool(2, harness.Setup(nodes="ab")).run(mixed, deadline_s=120)
    assert found == ["DesyncError"] * 2
