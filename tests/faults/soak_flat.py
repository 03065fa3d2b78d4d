# SPDX-License-Identifier: Apache-2.0
"""Two ranks live on while a third is killed or stopped, round after round: they may not grow.

    python -m tests.faults.soak_flat --seconds 600

A round is an episode of soak.py: random calls, an error, shrink, more calls. Then the two meet in a
group of torch.distributed. Decides what is measured after each round, and how far it may rise from
the first tenth of the rounds to the last.
"""

import argparse
import ctypes
import dataclasses
import gc
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.faults.soak import LIMIT_S, Fault, live
from tests.support.harness import Pool, Rank, Setup

VICTIM = 2
NUM_CALLS = 15
# Rounds before the first that counts: caches, thread pools and malloc's arenas fill.
WARM_UP = 5
# How far the median may rise. An allocator keeps some of what it gave, and maps it. A worker thread
# ends a while after its last call, or serves the next round.
BOUNDS = {"rss_mib": 16.0, "descriptors": 0.0, "threads": 4.0, "mappings": 40.0}
Sample = dict[str, float]
_leaked: list[object] = []


@dataclasses.dataclass
class Round:
    """The report of a lasting rank on a round."""

    problems: list[str]
    sample: Sample


def sample() -> Sample:
    """Measure what this process holds, after what is free has gone back to the kernel."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
    }


def be_victim(rank: Rank, seed: int, fault: Fault, address: tuple[str, int]) -> None:
    """Let a child be the rank; it goes on once it was stopped for longer than the others wait."""
    pid = os.fork()
    if pid == 0:
        # A connection of its own: who dies in the middle of a request leaves one unusable.
        rank.store = dist.TCPStore(*address, is_master=False)
        live(rank, seed, [fault], NUM_CALLS)
        os._exit(0)
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return
        time.sleep(LIMIT_S + 1)
        os.kill(pid, signal.SIGCONT)


def play(rank: Rank, seed: int, kind: str, backend: str, leak: bool) -> Round | None:
    """Live through one round."""
    tcp = rank.store.underlying_store
    fault = Fault(kind, VICTIM, random.Random(seed).randrange(NUM_CALLS))
    if rank.rank == VICTIM:
        be_victim(rank, seed, fault, (tcp.host, tcp.port))
        return None
    usual, rank.store = rank.store, tcp
    try:
        life = live(rank, seed, [fault], NUM_CALLS)
    finally:
        rank.store = usual
    problems = [*life.wrong, life.left_over] if life.left_over else life.wrong
    allowed = {"PeerLostError", "CollectiveTimeout"}
    problems += [f"{name} {ranks}" for _, name, ranks in life.errors if name not in allowed]
    problems += meet_in_torch(rank, seed, backend)
    if leak:
        _leaked.extend([bytearray(8 << 20), os.open("/dev/null", os.O_RDONLY)])
    return Round(problems, sample())


def meet_in_torch(rank: Rank, seed: int, backend: str) -> list[str]:
    """Use a group of torch.distributed of the two that last."""
    os.environ["FASTCOLL_TORCH_BACKEND"] = backend
    store = dist.PrefixStore(f"torch {seed}", rank.store)
    dist.init_process_group("fastcoll", store=store, rank=rank.rank, world_size=VICTIM)
    try:
        tensor = torch.ones(30_000)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        found: list[object] = [None] * VICTIM
        dist.all_gather_object(found, rank.rank)
        part = dist.new_group([0, 1])
        dist.barrier(part)
        good = float(tensor[-1]) == VICTIM and found == [0, 1]
        return [] if good else ["wrong in torch"]
    finally:
        dist.destroy_process_group()


def risen(samples: list[Sample]) -> list[str]:
    """Return what rose from the first tenth of the rounds to the last by more than its bound."""
    counted = samples[WARM_UP:]
    tenth = max(1, len(counted) // 10)
    problems = []
    for name, bound in BOUNDS.items():
        first, last = (
            statistics.median(one[name] for one in part)
            for part in (counted[:tenth], counted[-tenth:])
        )
        if last - first > bound:
            problems.append(f"{name} rose from {first:g} to {last:g}, by more than {bound:g}")
    return problems


def endure(
    seconds: float, seed: int, backend: str = "python", min_rounds: int = 15, *, leak: bool = False
) -> tuple[list[list[Sample]], list[str]]:
    """Play rounds for some time; return the samples by lasting rank, and what was wrong."""
    pool = Pool(VICTIM + 1, Setup(init=False))
    samples: list[list[Sample]] = [[] for _ in range(VICTIM)]
    problems: list[str] = []
    start = time.monotonic()
    try:
        while time.monotonic() - start < seconds or len(samples[0]) < min_rounds:
            number = len(samples[0])
            kind = "stop" if number % 10 == 7 else "kill"
            rows = pool.run(play, seed + number, kind, backend, leak, deadline_s=90)
            for rank, row in enumerate(rows[:VICTIM]):
                samples[rank].append(row.sample)
                problems += [f"seed {seed + number}, rank {rank}: {one}" for one in row.problems]
    finally:
        pool.close()
    for rank, mine in enumerate(samples):
        problems += [f"rank {rank}: {one}" for one in risen(mine)]
    return samples, problems


def main() -> int:
    """Endure for some time and say what was held at both ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--backend", choices=("python", "compiled"), default="python")
    options = parser.parse_args()
    samples, problems = endure(options.seconds, options.seed, options.backend)
    print(f"{len(samples[0])} rounds from seed {options.seed}, {len(problems)} problems")
    for rank, mine in enumerate(samples):
        for name in BOUNDS:
            held = [one[name] for one in mine[WARM_UP:]]
            tenth = max(1, len(held) // 10)
            medians = [
                statistics.median(held[at : at + tenth]) for at in range(0, len(held), tenth)
            ]
            print(f"rank {rank}: {name} by tenths: {', '.join(f'{one:g}' for one in medians)}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
