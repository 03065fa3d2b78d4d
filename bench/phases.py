# SPDX-License-Identifier: Apache-2.0
"""An all_reduce over two hosts beside its phases run alone: does one hide behind the other?

Alone means the same call with the other phase taken out: in the same segments, by all ranks at
once, over the same lanes. That is judged where both take as long. A link can be made slower, but
not faster than the CPUs handle its packets. So the hosts get enough ranks to make their phases as
long as the phase between the hosts, the hop. Then the link's rate is searched.

The share of the CPUs that the hop takes alone is written down, too. The phases within the hosts
need CPUs for all of their time, so nothing hides behind that share.
"""

import contextlib
import copy
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hosts import Hosts

import fastcoll
from fastcoll.measure.results import provenance
from fastcoll.nodes import reductions
from fastcoll.nodes.arrays import split
from fastcoll.nodes.carriers.carrier import Started
from fastcoll.nodes.lanes import Lanes
from fastcoll.nodes.reductions import Reduction
from fastcoll.types import DType, Op

Json = dict[str, Any]
LIMIT_S, END_S = 120.0, 10.0
ROUNDS, SEARCH_ROUNDS, MOST_STEPS, TRIES = 11, 5, 8, 3
FIRST_RATE_MBIT, MOST_RATE_MBIT = 1000.0, 50_000.0
# Of hop over phases within the hosts: where the whole is judged, and where the search stops, well
# within, as rounds differ.
BAND, AIM = (0.8, 1.25), (0.93, 1.08)


class _Over:
    """A transfer of nothing."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Within(Lanes):
    """Lanes that end at the host's edge: nothing crosses."""

    def exchange(
        self, slot: int, given: Sequence[torch.Tensor | None], expected: Sequence[int]
    ) -> tuple[list[torch.Tensor], Started]:
        """Get something, at once."""
        return split(torch.empty(sum(expected), dtype=torch.uint8), expected), _Over()


class Across(Lanes):
    """Lanes that begin at the host's edge: nothing moves within."""

    def node_reduce_scatter(self, buffer: torch.Tensor, op: Op, numerics: str) -> torch.Tensor:
        """Take the first part for the node's sum."""
        return buffer[: buffer.numel() // self.num_local]

    def node_all_gather(
        self, mine: torch.Tensor, out: torch.Tensor | None = None, limit_s: float | None = None
    ) -> torch.Tensor:
        """Leave the neighbours' parts as they are."""
        return mine if out is None else out


class Unsummed(Reduction):
    """A reduction within the hosts alone: the sums of the other hosts are not added."""

    def reduce(self, target: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """See `Reduction`."""


def _calls(num_bytes: int) -> dict[str, Callable[[], object]]:
    """Return an all_reduce of float32 and its phases, to be called by all ranks."""
    comm: Any = fastcoll.init()
    tensor = torch.zeros(num_bytes // 4)
    how = DType.float32, Op.SUM, "same_bits", False, comm.world_size

    def alone(kind: type[Lanes], reduction: Reduction) -> Callable[[], object]:
        lanes = copy.copy(comm._lanes)
        lanes.__class__ = kind

        def run() -> None:
            lanes.begin(LIMIT_S)
            reductions.reduce(lanes, reduction, tensor, tensor)

        return run

    return {
        "intra": alone(Within, Unsummed(*how)),
        "hop": alone(Across, Reduction(*how)),
        "whole": lambda: fastcoll.all_reduce(tensor),
    }


def _of_all_ranks(numbers: list[float], op: Any) -> list[float]:
    found = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(found, op)
    result: list[float] = found.tolist()
    return result


def _timed(calls: dict[str, Callable[[], object]], rounds: int) -> Json:
    """Time the calls in turns: of each round the slowest rank, and the CPU time of all ranks."""
    times_s: dict[str, list[float]] = {name: [] for name in calls}
    cpu_s: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            call()
            if number > 0:  # the first warms up
                times_s[name].append(time.perf_counter() - start)
                cpu_s[name].append(time.process_time() - cpu_start)
    slowest, total = dist.ReduceOp.MAX, dist.ReduceOp.SUM
    return {
        "times_s": {name: _of_all_ranks(row, slowest) for name, row in times_s.items()},
        "cpu_s": {name: _of_all_ranks(row, total) for name, row in cpu_s.items()},
    }


def be_rank(num_bytes: int) -> None:
    """Time as many rounds as rank 0 is told, and again, until it is told none."""
    calls = _calls(num_bytes)
    while True:
        rounds = torch.zeros(1, dtype=torch.int64)
        if dist.get_rank() == 0:
            rounds += int(sys.stdin.readline() or 0)
        dist.broadcast(rounds, 0)
        if not rounds:
            return
        found = _timed(calls, int(rounds))
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)


class Ranks:
    """The ranks of both hosts, which time rounds when they are asked to."""

    def __init__(self, hosts: Hosts, per_host: int, num_bytes: int) -> None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        argv = [str(Path(__file__).with_name("hierarchical.py")), "--rank", str(num_bytes)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        order = [0] * per_host + [1] * per_host
        self._processes = hosts.start_ranks(order, argv, port, **pipes)

    def time(self, rounds: int) -> Json:
        """Return the times of a number of rounds."""
        first = self._processes[0]
        assert first.stdin and first.stdout
        first.stdin.write(f"{rounds}\n")
        first.stdin.flush()
        line = first.stdout.readline()
        if not line:
            raise SystemExit("a rank failed")
        result: Json = json.loads(line)
        return result

    def end(self) -> None:
        """Ask them to end, then make them."""
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._processes[0].communicate("0\n", END_S)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.communicate()


def _middle(found: Json, what: str = "times_s") -> dict[str, float]:
    return {name: statistics.median(row) for name, row in found[what].items()}


def _ratio(found: Json) -> float:
    middle = _middle(found)
    return middle["hop"] / middle["intra"]


def _is_judged(found: Json) -> bool:
    return BAND[0] <= _ratio(found) <= BAND[1]


def _search(ranks: Ranks, hosts: Hosts, rate_mbit: float) -> tuple[float, Json]:
    """Find the rate at which the hop takes as long as the phases within hosts, if there is one.

    Returns:
        The rate, and the times at that rate.
    """
    for _ in range(TRIES):  # other load may change between search and rounds
        for _ in range(MOST_STEPS):
            hosts.set_rate(rate_mbit)
            ratio = _ratio(ranks.time(SEARCH_ROUNDS))
            print(f"{rate_mbit:.0f} Mbit/s: hop / phases within hosts {ratio:.2f}", flush=True)
            if AIM[0] <= ratio <= AIM[1] or rate_mbit * ratio > MOST_RATE_MBIT:
                break
            rate_mbit *= ratio
        if _is_judged(found := ranks.time(ROUNDS)):
            break
    return rate_mbit, found


def measure(num_bytes: int, per_host: int, rate_mbit: float | None) -> Json:
    """Print and return how the whole compares with its phases.

    Args:
        num_bytes: Of the all_reduce; made a multiple of the unit of lanes, to have no odd ends.
        per_host: Ranks on each of the two hosts.
        rate_mbit: Of the link; None: searched.
    """
    num_bytes -= num_bytes % (4 * per_host)
    with Hosts(rate_mbit or 0) as hosts:
        ranks = Ranks(hosts, per_host, num_bytes)
        try:
            if rate_mbit is None:
                rate_mbit, found = _search(ranks, hosts, FIRST_RATE_MBIT)
            else:
                found = ranks.time(ROUNDS)
        finally:
            ranks.end()
    middle = _middle(found)
    intra, hop, whole = (middle[name] for name in ("intra", "hop", "whole"))
    share = _middle(found, "cpu_s")["hop"] / hop / (os.cpu_count() or 1)
    text = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in middle.items())
    print(f"{num_bytes} B at {rate_mbit:.0f} Mbit/s, 2 hosts of {per_host} ranks: {text}")
    print(f"hop / phases within hosts {hop / intra:.2f}; alone it takes {share:.0%} of the CPUs")
    whole_over_sum = round(whole / (intra + hop), 3) if _is_judged(found) else None
    print(f"whole / sum of the phases alone: {whole_over_sum or 'not measured, as they differ'}")
    settings = {"world_size": 2 * per_host, "num_bytes": num_bytes, "rate_mbit": round(rate_mbit)}
    return {
        "kind": "pipelining",
        **provenance(),
        "settings": settings,
        "times_s": found["times_s"],
        "hop_over_intra": round(hop / intra, 3),
        "whole_over_sum": whole_over_sum,
        "hop_cpu_share": round(share, 3),
    }
