# SPDX-License-Identifier: Apache-2.0
"""Times the model's schedules, carried out, beside the built-in algorithms.

    python bench/schedules.py [FILE.md]

All algorithms of all_reduce in turns on the same ranks and tensors, every result checked first.
Takes about two minutes. Nothing else should run meanwhile.
"""

import sys
import tempfile
from pathlib import Path

from fastcoll.measure.machine import cpu_model, load_average, now
from fastcoll.measure.pattern import make_cell
from fastcoll.measure.pool import own_pool
from fastcoll.measure.rounds import measure_cell
from fastcoll.measure.sizes import format_number, format_size
from fastcoll.measure.timer import Budget
from fastcoll.measure.variants import SEGMENTS_BYTES, Variant, variants_of
from fastcoll_model.builders import algorithms_of

WORLDS = (2, 4)
SIZES_BYTES = (1 << 10, 32 << 10, 1 << 20, 16 << 20)
BUDGET = Budget(window_us=2000, min_windows=3, max_windows=9, num_rounds=4)
SEGMENT_BYTES = SEGMENTS_BYTES[1]


def measure(world: int, folder: Path) -> dict[str, list[str]]:
    """Return, for each algorithm, its median time at each size."""
    columns: dict[str, list[str]] = {}
    with own_pool("fastcoll_variants", world, folder) as pool:
        for size_bytes in SIZES_BYTES:
            cell = make_cell("all_reduce", "float32", "sum", size_bytes, world)
            own = [v for v in variants_of(pool, cell) if v.segment_bytes == SEGMENT_BYTES]
            names = [name for name in algorithms_of("all_reduce") if name != "multimem"]
            mine = [Variant(pool, f"schedule:{name}", SEGMENT_BYTES) for name in names]
            for outcome in measure_cell([*own, *mine], cell, BUDGET, lambda name: None):
                name = outcome.library.rpartition("/")[0]
                found = outcome.summary
                text = outcome.reason or "" if found is None else format_number(found.time_us, 4)
                columns.setdefault(name, []).append(text)
    return columns


def main() -> None:
    lines = [
        "# Schedules beside the built-in algorithms",
        "",
        f"all_reduce of float32, compiled loops, median us; {cpu_model()}, {now()}, load "
        f"{load_average()}. `python bench/schedules.py`",
    ]
    for world in WORLDS:
        with tempfile.TemporaryDirectory(prefix="fc") as folder:
            columns = measure(world, Path(folder))
        head = " | ".join(format_size(size) for size in SIZES_BYTES)
        lines += ["", f"| {world} ranks | {head} |", "|---" * (1 + len(SIZES_BYTES)) + "|"]
        lines += [f"| {name} | {' | '.join(times)} |" for name, times in columns.items()]
    text = "\n".join(lines) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
