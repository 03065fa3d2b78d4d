# SPDX-License-Identifier: Apache-2.0
"""Two hosts over a slow link: all_reduce of float32 with each `wire`, in turns.

    python bench/wire.py                # 64 MiB, 1 Gbit/s, two ranks on each host

Prints for each format the time, the bytes that the first host sent, and the largest error as a part
of the largest element. Writes all of it to --json. Needs root: see hosts.py.
"""

import argparse
import json
import socket
import statistics
from datetime import timedelta
from pathlib import Path
from typing import Any

from hierarchical import slowest, timed
from hosts import LINK, Hosts
from records import write

from fastcoll.measure.results import provenance

WIRES = ("none", "int8", "fp8", "bf16")


def sent_bytes() -> int:
    """Return how many bytes this process's host has sent over its link."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == LINK:
            return int(counters.split()[8])
    raise SystemExit(f"no link {LINK} here")


def measure(num_bytes: int, rounds: int) -> dict[str, Any]:
    """Time all formats in turns; part of every rank's program."""
    import torch
    import torch.distributed as dist

    import fastcoll

    torch.manual_seed(dist.get_rank())
    source = torch.randn(num_bytes // 4)
    exact = source.double()
    dist.all_reduce(exact)
    result: dict[str, Any] = {}
    times: dict[str, list[float]] = {wire: [] for wire in WIRES}
    sent: dict[str, list[int]] = {wire: [] for wire in WIRES}
    for number in range(rounds + 1):
        for wire in WIRES:
            tensor = source.clone()
            dist.barrier()
            before = sent_bytes()
            seconds = timed(
                lambda tensor=tensor, wire=wire: fastcoll.all_reduce(
                    tensor, wire=None if wire == "none" else wire
                )
            )
            dist.barrier()
            if number > 0:  # the first warms up
                times[wire].append(seconds)
                sent[wire].append(sent_bytes() - before)
                error = (tensor.double() - exact).abs().max() / exact.abs().max()
                result[wire] = {"largest_error": error.item()}
    for wire in WIRES:
        result[wire] |= {"times_s": slowest(times[wire]), "sent_bytes": sent[wire]}
    return result


def rank_main(num_bytes: int, rounds: int, path: Path) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    import fastcoll

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    fastcoll.init()
    result = measure(num_bytes, rounds)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(result))
    dist.barrier()
    fastcoll.destroy()
    dist.destroy_process_group()


def on_hosts(args: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks' program and return rank 0's result."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    sizes = ["--bytes", str(args.bytes), "--rounds", str(args.rounds)]
    argv = [str(Path(__file__).resolve()), "--rank", *sizes, "--json", str(args.json)]
    order = [host for host in (0, 1) for _ in range(args.local_ranks)]
    with Hosts(args.rate_mbit, args.delay_ms) as hosts:
        codes = [rank.wait() for rank in hosts.start_ranks(order, argv, port)]
    if any(codes):
        raise SystemExit("a rank failed")
    result: dict[str, Any] = json.loads(args.json.read_text())
    return result


def row(wire: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return a format's medians, beside those of plain elements."""
    seconds, plain_s = (statistics.median(found[one]["times_s"]) for one in (wire, "none"))
    sent, plain = (statistics.median(found[one]["sent_bytes"]) for one in (wire, "none"))
    return {
        "ms": round(seconds * 1e3, 2),
        "times_as_quick": round(plain_s / seconds, 3),
        "part_of_bytes": round(sent / plain, 4),
        "largest_error": float(f"{found[wire]['largest_error']:.3g}"),
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate-mbit", type=float, default=1000)
    parser.add_argument("--delay-ms", type=float, default=0)
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--local-ranks", type=int, default=2, help="on each host")
    parser.add_argument("--json", type=Path, default=Path("wire.json"))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.bytes, args.rounds, args.json)
        return
    args.json = args.json.resolve()
    found = on_hosts(args)
    rows = {wire: row(wire, found) for wire in WIRES}
    for wire in WIRES:
        print(f"{wire:5} {rows[wire]}", flush=True)
    names = ("rate_mbit", "delay_ms", "bytes")
    settings = {"world_size": 2 * args.local_ranks} | {one: getattr(args, one) for one in names}
    formats = {wire: rows[wire] | found[wire] for wire in WIRES}
    write({"kind": "wire", **provenance(), "settings": settings, "formats": formats}, args.json)


if __name__ == "__main__":
    main()
