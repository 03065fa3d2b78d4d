# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of the checks to an 8-byte all_reduce: bench/results/MACHINE/checks.json.

    python bench/checks_cost.py bench/results/MACHINE

Compiles bench/checks_cost.cpp, which runs the protocol with and without its checks in windows
that take turns. Writes the median difference with its 95 % confidence interval. The difference of
the same code twice is written too: it is chance, and counts against the goal. Only on an idle
machine with two cores.
"""

import argparse
import json
import math
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median

from records import write

from fastcoll.measure.results import provenance

ROOT = Path(__file__).parents[1]
GOAL_SHARE, GOAL_NS = 0.05, 15.0


def compile_program(folder: Path) -> Path:
    """Build the two variants in one program, as the library is built."""
    program = folder / "checks_cost"
    sources = [ROOT / "bench" / "checks_cost.cpp", *sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))]
    flags = ["-std=c++20", "-O3", "-DNDEBUG", "-ffp-contract=off", "-pthread"]
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'kernels'}"]
    subprocess.run(["g++", *flags, *includes, *map(str, sources), "-o", str(program)], check=True)
    return program


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, from the order of the values alone."""
    ordered, count = sorted(values), len(values)
    reach = math.ceil(1.96 * math.sqrt(count) / 2)
    middle = count // 2
    return ordered[max(0, middle - reach)], ordered[min(count - 1, middle + reach)]


def report(rows: list[tuple[float, float, float]]) -> dict[str, object]:
    """Return medians in nanoseconds, and the differences window by window."""
    extra = [checked - unchecked for checked, unchecked, _ in rows]
    share = [checked / unchecked - 1 for checked, unchecked, _ in rows]
    chance = [checked - twin for checked, _, twin in rows]
    extra_ns, extra_share, chance_ns = median(extra), median(share), median(chance)
    return {
        "num_windows": len(rows),
        "checked_ns": median(checked for checked, _, _ in rows),
        "unchecked_ns": median(unchecked for _, unchecked, _ in rows),
        "extra_ns": extra_ns,
        "extra_ns_interval": interval(extra),
        "extra_share": extra_share,
        "extra_share_interval": interval(share),
        "chance_ns": chance_ns,
        "chance_ns_interval": interval(chance),
        "reached": extra_share <= GOAL_SHARE or extra_ns + abs(chance_ns) <= GOAL_NS,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--calls", type=int, default=10_000)
    options = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise SystemExit(
            "this takes two CPUs: a call between ranks that share one is no 8-byte call"
        )
    origin = provenance()
    with tempfile.TemporaryDirectory() as folder:
        program = compile_program(Path(folder))
        command = [options.windows, options.calls, cpus[0], cpus[1]]
        done = subprocess.run(
            [str(program), *map(str, command)], check=True, capture_output=True, text=True
        )
    lines = (line.split() for line in done.stdout.splitlines())
    rows = [(float(a), float(b), float(c)) for a, b, c in lines]
    result = {
        "kind": "checks",
        **origin,
        "settings": {"world_size": 2, "windows": options.windows, "calls": options.calls},
        "what": "all_reduce of 8 bytes, 2 ranks: the code that ships, and the same unchecked",
        **report(rows),
        "windows_ns": rows,
    }
    write(result, options.folder / "checks.json")
    shown = {key: value for key, value in result.items() if key not in ("windows_ns", "machine")}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
