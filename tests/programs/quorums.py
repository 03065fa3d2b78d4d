# SPDX-License-Identifier: Apache-2.0
"""torchft: process groups that are made anew, and its manager's averages."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch._C._distributed_c10d import AllgatherOptions, BarrierOptions
from torch.distributed import ReduceOp
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupGloo

from fastcoll.integrations.torchft_group import ProcessGroupFastcoll

LIMIT = timedelta(seconds=60)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
KINDS = {"gloo": ProcessGroupGloo, "fastcoll": ProcessGroupFastcoll}


def _store() -> dist.Store:
    """The store of torchrun."""
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)


def reconfigured(backend: str) -> Any:
    """Results of one group of torchft over three quorums, the second of rank 0 alone."""
    group = KINDS[backend](timeout=LIMIT)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    found = []
    for quorum, size in enumerate((WORLD, 1, WORLD)):
        if size == 1 and RANK:
            continue
        group.configure(f"{where}/{backend}/{quorum}", f"replica {RANK}", RANK, size, quorum)
        tensor = torch.full((3,), RANK + 1.0)
        group.allreduce([tensor], ReduceOp.SUM).wait()
        parts = [[torch.zeros(1) for _ in range(size)]]
        group.allgather(parts, [torch.tensor([RANK + 5.0])], AllgatherOptions()).wait()
        group.barrier(BarrierOptions()).wait()
        found.append((group.size(), tensor.tolist(), torch.cat(parts[0]).tolist()))
    group.shutdown()
    return found


def managed(backend: str) -> Any:
    """The average of two replicas under torchft's manager and lighthouse, for some steps."""
    store = _store()
    if RANK == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=WORLD)
        port = lighthouse.address().rpartition(":")[2]
        store.set("lighthouse", f"http://127.0.0.1:{port}")
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=KINDS[backend](timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=WORLD,
        replica_id=f"replica_{RANK}",
        store_addr="127.0.0.1",
        store_port=own.port,
        rank=0,
        world_size=1,
        lighthouse_addr=store.get("lighthouse").decode(),
        hostname="127.0.0.1",
        init_sync=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
    )
    found = []
    for step in range(3):
        manager.start_quorum()
        tensor = torch.full((2,), float(RANK + step))
        manager.allreduce(tensor).wait()
        found.append((tensor.tolist(), manager.should_commit(), manager.num_participants()))
    store.set(f"done/{RANK}", "")
    store.wait([f"done/{rank}" for rank in range(WORLD)])  # rank 0 has the lighthouse
    manager.shutdown(wait=False)
    return found
