# SPDX-License-Identifier: Apache-2.0
"""Times the part of memory in a large all_reduce of two ranks: reading their inputs once.

    python bench/memory_floor.py [FILE.json]

An all_reduce has that to do, and to write as much. Compiles bench/memory_floor.cpp, whose two
threads read half of both inputs each and do not wait in between. Medians of rounds. Ten
seconds. Nothing else should run meanwhile.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from records import write

from fastcoll.measure.results import provenance
from fastcoll.measure.sizes import format_size, parse_size

SOURCE = Path(__file__).with_suffix(".cpp")
SIZES, ROUNDS = ("32M", "128M", "256M"), 25


def measure(sizes: list[int], rounds: int) -> dict[str, float]:
    """Return microseconds by bytes of a message, as JSON has them."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise SystemExit("this takes two CPUs: two ranks that share one read by turns")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "memory_floor")
        subprocess.run(
            ["g++", "-std=c++20", "-O3", "-pthread", str(SOURCE), "-o", str(program)], check=True
        )
        command = [program, rounds, *cpus[:2], *sizes]
        done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    lines = (line.split() for line in done.stdout.splitlines())
    return {size: float(time_us) for size, time_us in lines}


def main() -> None:
    origin = provenance()
    read_us = measure([parse_size(size) for size in SIZES], ROUNDS)
    if len(sys.argv) > 1:
        settings = {"world_size": 2, "rounds": ROUNDS}
        document = {"kind": "memory", **origin, "settings": settings, "read_us": read_us}
        write(document, Path(sys.argv[1]))
    for size, time_us in read_us.items():
        print(f"{format_size(int(size))}: {time_us / 1e3:.1f} ms to read both inputs once")


if __name__ == "__main__":
    main()
