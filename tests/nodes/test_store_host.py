# SPDX-License-Identifier: Apache-2.0
"""The process that serves the store ends with an error, dies or stops: who is lost is known."""

import signal
from pathlib import Path

import pytest

from tests.support.backends import BACKENDS
from tests.support.launched import free_port
from tests.support.programs import run_forked

# Rank 0 serves the store. A rank of its node is lost; the other one ends as a program does: with
# its error. Rank 2 is on another node.
PROGRAM = """
import os, signal, sys, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
import fastcoll

rank, port, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
lost, end, limit_s = int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])
os.environ["FASTCOLL_NODE_ID"] = "aab"[rank]
store = dist.TCPStore("127.0.0.1", port, 3, rank == 0)
if kind == "native":
    fastcoll.init(store=store, rank=rank, world_size=3, timeout_s=limit_s)
    calls = fastcoll
else:
    os.environ["FASTCOLL_TORCH_BACKEND"] = kind
    limit = timedelta(seconds=limit_s)
    dist.init_process_group("fastcoll", store=store, rank=rank, world_size=3, timeout=limit)
    calls = dist
while any(thread.name == "fastcoll-question" for thread in threading.enumerate()):
    time.sleep(0.01)  # what a rank learns in the background when its group is made
store.set(f"pid/{rank}", str(os.getpid()))
calls.all_reduce(torch.ones(4))
pid = int(store.get(f"pid/{lost}"))
calls.all_reduce(torch.ones(4))
if rank == lost:
    os.kill(os.getpid(), end)
    os._exit(4)
try:
    calls.all_reduce(torch.ones(4))
except fastcoll.FastcollError as error:
    print(type(error).__name__, error.ranks, error, flush=True)
if rank == 2:
    os.kill(pid, signal.SIGKILL)  # which may be stopped
os._exit(3)
"""


@pytest.mark.parametrize("kind", ["native", *BACKENDS])
@pytest.mark.parametrize(
    ("lost", "end", "limit_s", "error"),
    [
        (1, signal.SIGKILL, 30, "PeerLostError (1,) "),
        (0, signal.SIGKILL, 30, "PeerLostError (0,) "),
        (0, signal.SIGSTOP, 3, "CollectiveTimeout (0,) "),
    ],
    ids=["its peer dies", "it dies", "it stops"],
)
def test_other_nodes_hear_who_is_lost(
    tmp_path: Path, kind: str, lost: int, end: int, limit_s: float, error: str
) -> None:
    port = str(free_port())
    same = port, kind, str(lost), str(int(end)), str(limit_s)
    results = run_forked(tmp_path, PROGRAM, [(str(rank), *same) for rank in range(3)])
    assert results[lost][0] == -signal.SIGKILL
    first, other = results[1 - lost][1], results[2][1]
    assert first.startswith(error), results
    assert other == first
