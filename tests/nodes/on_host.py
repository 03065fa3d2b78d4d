# SPDX-License-Identifier: Apache-2.0
"""A rank of torchrun on a host of bench/hosts.py: trains with DDP and with FSDP2.

torchrun ... on_host.py FOLDER    # where each rank leaves its node map and its results
"""

import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.support import training


def main(folder: Path) -> None:
    """Train as one process of several."""
    dist.init_process_group("fastcoll", timeout=timedelta(seconds=60))
    me: Any = SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    found = [program(me) for program in (training.data_parallel, training.fully_sharded)]
    group: Any = dist.group.WORLD
    nodes = group._get_backend(torch.device("cpu")).communicator.node_map.nodes
    torch.save([nodes, found], folder / f"{me.rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
