# SPDX-License-Identifier: Apache-2.0
"""A rank on a host of bench/hosts.py: does what its first argument says, tells in lines of JSON."""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import fastcoll
from fastcoll.nodes.verdict import doors, machines


def tell(value: Any) -> None:
    print(json.dumps(value), flush=True)


def until_broken(limit_s: float) -> None:
    """Small and large calls until an error comes."""
    fastcoll.init(timeout_s=limit_s)
    tensor = torch.zeros(500_000)
    fastcoll.all_reduce(tensor)
    tell("ready")
    last = time.monotonic()
    try:
        while True:
            fastcoll.all_reduce(tensor)
            fastcoll.barrier()
            last = time.monotonic()
    except fastcoll.FastcollError as error:
        seconds = time.monotonic() - last
        tell([type(error).__name__, str(error), list(getattr(error, "ranks", ())), seconds])


def go_on(limit_s: float) -> None:
    """The same; then with those that are left."""
    until_broken(limit_s)
    group: Any = fastcoll.shrink()
    tensor = torch.full((500_000,), 1.0 + group.rank)
    fastcoll.all_reduce(tensor)
    tell([group.node_map.nodes, tensor.unique().tolist()])


def find_machines(silent_s: float, limit_s: float) -> Any:
    """Return a group in which each rank has waited long, so that it looks at the other machine."""
    doors.PROBES, machines.SILENT_S = (1, 1, 2), silent_s
    group = fastcoll.init(timeout_s=limit_s)
    for late in (0, 2):
        if group.rank == late:
            time.sleep(1.5)
        group.barrier()
    tell("ready")
    return group


def until_silent(limit_s: float) -> None:
    """Calls until an error comes; machines count as lost within seconds. Rank 0 receives."""
    group, tensor = find_machines(1.0, limit_s), torch.zeros(500_000)
    try:
        while group.rank:
            fastcoll.all_reduce(tensor)
        group.recv(tensor, 2)
    except fastcoll.FastcollError as error:
        tell([type(error).__name__, str(error), list(getattr(error, "ranks", ()))])


def through_a_cut(limit_s: float) -> None:
    """Calls for some seconds, over a link that is cut for fewer than a machine may be silent."""
    find_machines(10.0, limit_s)
    end, tensor = time.monotonic() + 6, torch.ones(500_000)
    while tensor[0]:
        tensor.fill_(time.monotonic() < end)
        fastcoll.all_reduce(tensor)
    tell("through")


def train(limit_s: float) -> None:
    """Train with DDP and with FSDP2, as a program that torchrun starts; results go to a folder."""
    from tests.support import training

    dist.init_process_group("fastcoll", timeout=timedelta(seconds=limit_s))
    me: Any = SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    found = [program(me) for program in (training.data_parallel, training.fully_sharded)]
    group: Any = dist.group.WORLD
    nodes = group._get_backend(torch.device("cpu")).communicator.node_map.nodes
    torch.save([nodes, found], Path(sys.argv[3], f"{me.rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


PROGRAMS: dict[str, Callable[[float], None]] = {
    program.__name__: program
    for program in (until_broken, go_on, until_silent, through_a_cut, train)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]](float(sys.argv[2]))
