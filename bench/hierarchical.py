# SPDX-License-Identifier: Apache-2.0
"""Two hosts of two ranks: fastcoll against flat Gloo, in turns and in the same processes.

    python bench/hierarchical.py                   # 1 Gbit/s, 2 ms: the table against flat Gloo
    python bench/hierarchical.py --pipelining      # the whole against its phases run alone

Prints a line for each size and order of the ranks, and writes all times to --json. Needs root: see
hosts.py. The docstring of phases.py defines "alone", and the rate of the link.
"""

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from records import write

from fastcoll.measure.results import provenance

SIZES = {64: 15, 64 << 10: 15, 64 << 20: 5}  # bytes: rounds
ORDERS = {"contiguous": (0, 0, 1, 1), "interleaved": (0, 1, 0, 1)}


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call that all ranks begin together."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def slowest(seconds: list[float]) -> list[float]:
    """Return the time of the slowest rank, round by round."""
    import torch
    import torch.distributed as dist

    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    result: list[float] = times.tolist()
    return result


def against_gloo() -> dict[str, Any]:
    """Time all_reduce of float32 by both, in turns; part of every rank's program."""
    import torch
    import torch.distributed as dist

    import fastcoll

    result = {}
    for num_bytes, rounds in SIZES.items():
        tensor = torch.ones(num_bytes // 4)
        calls = {
            "gloo": lambda tensor=tensor: dist.all_reduce(tensor),
            "fastcoll": lambda tensor=tensor: fastcoll.all_reduce(tensor),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 1):
            for name, call in calls.items():
                tensor.fill_(1)
                seconds = timed(call)
                assert tensor.eq(dist.get_world_size()).all(), f"{name}: wrong result"
                if number > 0:  # the first warms up
                    times[name].append(seconds)
        result[str(num_bytes)] = {name: slowest(row) for name, row in times.items()}
    return result


def rank_main(what: str, path: str) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    import fastcoll

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    if what == "gloo":
        fastcoll.init()
        result = against_gloo()
        if dist.get_rank() == 0:
            Path(path).write_text(json.dumps(result))
    else:
        from phases import be_rank

        be_rank(int(what))
    dist.barrier()
    fastcoll.destroy()
    dist.destroy_process_group()


def on_hosts(hosts: Any, order: tuple[int, ...], what: str, path: Path) -> dict[str, Any]:
    """Run the ranks' program and return rank 0's result."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    argv = [str(Path(__file__).resolve()), "--rank", what, "--json", str(path)]
    codes = [rank.wait() for rank in hosts.start_ranks(order, argv, port)]
    if any(codes):
        raise SystemExit("a rank failed")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Print and return the table against flat Gloo."""
    from hosts import Hosts

    orders: dict[str, Any] = {}
    rate_mbit = args.rate_mbit or 1000
    for name, order in ORDERS.items():
        with Hosts(rate_mbit, args.delay_ms) as hosts:
            found = on_hosts(hosts, order, "gloo", args.json)
        orders[name] = {"times_s": found, "gloo_over_fastcoll": {}}
        for num_bytes, times in found.items():
            gloo, ours = (statistics.median(times[one]) for one in ("gloo", "fastcoll"))
            orders[name]["gloo_over_fastcoll"][num_bytes] = round(gloo / ours, 3)
            row = f"{gloo / ours:5.2f}x  gloo {gloo * 1e3:8.2f} ms  fastcoll {ours * 1e3:8.2f} ms"
            print(f"{name:12} {int(num_bytes):>9} B  {row}", flush=True)
    settings = {"world_size": 4, "rate_mbit": rate_mbit, "delay_ms": args.delay_ms}
    return {"kind": "hierarchical", **provenance(), "settings": settings, "orders": orders}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate-mbit", type=float, help="of the link; 1000, pipelining: searched")
    parser.add_argument("--delay-ms", type=float, default=2)
    parser.add_argument("--pipelining", action="store_true")
    parser.add_argument("--bytes", type=int, default=64 << 20, help="pipelining")
    parser.add_argument("--local-ranks", type=int, default=16, help="pipelining: on each host")
    parser.add_argument("--json", type=Path, default=Path("hierarchical.json"))
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rank, str(args.json))
        return
    sys.path.append(str(Path(__file__).parent))
    args.json = args.json.resolve()
    if args.pipelining:
        from phases import measure

        results = measure(args.bytes, args.local_ranks, args.rate_mbit)
    else:
        results = compare(args)
    write(results, args.json)


if __name__ == "__main__":
    main()
