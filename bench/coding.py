# SPDX-License-Identifier: Apache-2.0
"""Times one core at coding arrays for `wire=`, adding two of them, and decoding one.

    python bench/coding.py [FILE.json]

4 Mi float32 elements, at each SIMD level of this CPU, and a plain copy of them: memory allows no
more. Levels, formats and steps take turns. Prints GB/s of float32 elements, by medians. Half a
minute. Nothing else should run meanwhile.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from records import write

from fastcoll.measure.results import provenance
from fastcoll.native import _C
from fastcoll.nodes.arrays import add_coded, code
from fastcoll.types import Wire

NUMEL, ROUNDS = 4 << 20, 21
WIRES = (Wire.bf16, Wire.int8, Wire.fp8)


def steps_of(wire: Wire) -> dict[str, Callable[[], object]]:
    """Return what is timed of a format, by name."""
    source, target = torch.randn(NUMEL), torch.empty(NUMEL)
    rows = [code(wire, source, None, 1) for _ in range(2)]
    add = partial(add_coded, wire, target=target, numel=NUMEL, coded_again=False)
    return {
        "code": lambda: _C.code_array(wire, source.data_ptr(), rows[1].data_ptr(), 0, NUMEL, 1),
        "add 2": lambda: add(rows),
        "decode": lambda: add(rows[:1]),
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, nargs="?")
    args = parser.parse_args()
    origin = provenance()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    steps = {(wire, name): step for wire in WIRES for name, step in steps_of(wire).items()}
    source, target = torch.randn(NUMEL), torch.empty(NUMEL)
    steps[Wire.none, "copy"] = lambda: target.copy_(source)
    rows = [(level, *key) for level in _C.simd_levels() for key in steps]
    times_s: dict[tuple[str, Wire, str], list[float]] = {row: [] for row in rows}
    for _ in range(1 + ROUNDS):
        for level, wire, name in rows:
            _C.set_simd_level(level)
            start = time.perf_counter()
            steps[wire, name]()
            times_s[level, wire, name].append(time.perf_counter() - start)
    gbps: dict[str, dict[str, dict[str, float]]] = {}
    for (level, wire, name), of_rounds in times_s.items():
        speed = 4 * NUMEL / median(of_rounds[1:]) / 1e9  # the first round warms up
        gbps.setdefault(level, {}).setdefault(wire.name, {})[name] = float(f"{speed:.3g}")
    for level, formats in gbps.items():
        for format_name, speeds in formats.items():
            print(f"{level:9} {format_name:5} {speeds}")
    if args.file is not None:
        settings = {"world_size": 1, "numel": NUMEL, "rounds": ROUNDS}
        write({"kind": "coding", **origin, "settings": settings, "gbps": gbps}, args.file)


if __name__ == "__main__":
    main()
