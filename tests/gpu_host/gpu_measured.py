# SPDX-License-Identifier: Apache-2.0
"""Where the scripts of bench/gpu are, and a measured.json as one of them writes it."""

from pathlib import Path
from typing import Any

GPU = Path(__file__).parents[2] / "bench/gpu"
MEASURED: dict[str, Any] = {
    "copy_gbps": 4000.0,
    "num_gpus": 1,
    "left_out": [[8, "auto", 8, "eager"]],
    "rows": [
        {
            "verb": "all_reduce",
            "ranks": 2,
            "algorithm": algorithm,
            "mode": "graph",
            "size_bytes": size,
            "time_us": 5.0,
            "fraction_of_copy": 0.5,
        }
        for algorithm in ("auto", "two_shot")
        for size in (8, 1024)
    ],
}
