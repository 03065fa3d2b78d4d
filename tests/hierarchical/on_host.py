# SPDX-License-Identifier: Apache-2.0
"""A rank on a host of bench/hosts.py: does what its first argument says, tells in lines of JSON."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import fastcoll


def tell(value: Any) -> None:
    print(json.dumps(value), flush=True)


def wait_for_word() -> None:
    sys.stdin.readline()


def total(limit_s: float) -> None:
    """Who shares memory is found out; the verbs work."""
    comm: Any = fastcoll.init(timeout_s=limit_s)
    tensor = torch.arange(300_000.0) + comm.rank
    fastcoll.all_reduce(tensor)
    world = comm.world_size
    expected = torch.arange(300_000.0) * world + sum(range(world))
    objects = [None] * world
    fastcoll.all_gather_object(objects, comm.rank)
    tell([comm.islands.nodes, bool(torch.equal(tensor, expected)), objects])


def reduce_once(limit_s: float) -> None:
    """One all_reduce between two words, so that its bytes can be counted."""
    fastcoll.init(timeout_s=limit_s)
    tensor = torch.zeros(int(sys.argv[3]) // 4)
    fastcoll.all_reduce(tensor)
    tell("ready")
    wait_for_word()
    fastcoll.all_reduce(tensor)
    tell("done")
    wait_for_word()


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


PROGRAMS: dict[str, Callable[[float], None]] = {
    program.__name__: program for program in (total, reduce_once, until_broken)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]](float(sys.argv[2]))
