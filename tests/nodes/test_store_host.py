# SPDX-License-Identifier: Apache-2.0
"""The process that serves the store may end with an error: the other nodes hear the error first."""

import signal
from pathlib import Path

import pytest

from tests.support.backends import BACKENDS
from tests.support.launched import free_port
from tests.support.programs import run_forked

# Rank 1 dies. Rank 0 of its node sees that at once, and ends as a program does: with its error.
PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
import fastcoll

rank, port, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ["FASTCOLL_NODE_ID"] = "aab"[rank]
store = dist.TCPStore("127.0.0.1", port, 3, rank == 0)
if kind == "native":
    fastcoll.init(store=store, rank=rank, world_size=3)
    calls = fastcoll
else:
    os.environ["FASTCOLL_TORCH_BACKEND"] = kind
    dist.init_process_group("fastcoll", store=store, rank=rank, world_size=3)
    calls = dist
for _ in range(3):
    calls.all_reduce(torch.ones(4))
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    calls.all_reduce(torch.ones(4))
except fastcoll.PeerLostError as error:
    print(error.ranks, error, flush=True)
os._exit(3)
"""


@pytest.mark.parametrize("kind", ["native", *BACKENDS])
def test_other_nodes_hear_who_died(tmp_path: Path, kind: str) -> None:
    port = str(free_port())
    ranks = [(str(rank), port, kind) for rank in range(3)]
    (_, first, _), (code, *_), (_, other, _) = run_forked(tmp_path, PROGRAM, ranks)
    assert code == -signal.SIGKILL
    assert first.startswith("(1,) "), first
    assert other == first
