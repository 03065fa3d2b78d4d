# SPDX-License-Identifier: Apache-2.0
"""Make every picture in docs/ and in the README: docs/pictures/*.svg.

Run it after a change of the model or of the result file that the README's picture shows. A test,
tests/model/test_docs.py, fails where a picture is out of date. It measures nothing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastcoll_model.buckets import Layer, best_bucket_bytes, overlap
from fastcoll_model.builders import build
from fastcoll_model.charts import bucket_times, cost_curves, plan_bars, published_times, ring_paths
from fastcoll_model.explain import compare
from fastcoll_model.fabric import OneSwitch
from fastcoll_model.figures import save
from fastcoll_model.formulas import Constants, estimate_us
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.machines.machine import load_machine, load_network
from fastcoll_model.picture import draw
from fastcoll_model.placement import disjoint_rings, mapping_us
from fastcoll_model.published import held_out_rows
from fastcoll_model.simulator import simulate
from fastcoll_model.strategies import Planner, Workload

FOLDER = Path(__file__).parent / "pictures"
# The README's table shows the same file.
MEASURED = FOLDER.parents[1] / "bench/results/xeon-amx-2core/python-float32.json"
LIBRARIES = {
    "fastcoll": "fastcoll",
    "gloo": "Gloo",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intelmpi": "Intel MPI",
}
TIERS = {
    "NVLink: 1 us, 300 GB/s": Constants(1, 1 / 300e3),
    "PCIe: 2 us, 25 GB/s": Constants(2, 1 / 25e3),
    "InfiniBand NDR: 3 us, 50 GB/s": Constants(3, 1 / 50e3),
    "25 G Ethernet: 30 us, 3.1 GB/s": Constants(30, 1 / 3.1e3),
}
MODEL = Workload(num_params=7e9, num_layers=32, hidden=4096, tokens=4096)


def sizes(first: int, last: int, step: int) -> list[int]:
    return [1 << shift for shift in range(first, last + 1, step)]


def schedule(algorithm: str, verb: str = "all_reduce") -> Any:
    built = build(verb, algorithm, 4)
    timing = simulate(built, OneSwitch(4, 1.0, 1e-3), 1 << 20, trace=True)
    return draw(built, timing, f"{verb} by {algorithm}, 4 ranks, 1 MiB at 1 us and 1 GB/s")


def all_reduce() -> Any:
    """Draw the times of a result file, as Python's callers see them."""
    document = json.loads(MEASURED.read_text())
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in LIBRARIES.values()}
    for row in document["rows"]:
        for cell in row["cells"]:
            if cell["library"] in LIBRARIES and "time_us" in cell:
                curves[LIBRARIES[cell["library"]]].append((row["size_bytes"], cell["time_us"]))
    day, commit = document["date"][:10], document["commit"]["hash"][:7]
    title = "all_reduce of float32 from Python, 2 ranks on 2 cores of an Intel Xeon"
    return cost_curves(curves, f"{title} ({day}, {commit})")


def tiers() -> Any:
    curves = {
        name: [(size, tier.message_us(size)) for size in sizes(6, 28, 2)]
        for name, tier in TIERS.items()
    }
    return cost_curves(curves, "One message over the four tiers")


def costs() -> Any:
    cluster = Cluster(load_machine("hgx-h100"))
    curves: dict[str, list[tuple[float, float]]] = {}
    least = []
    for size in sizes(10, 28, 3):
        found = compare("all_reduce", cluster, 8, size, "fast")
        least.append((float(size), found.least_us))
        for one in found.candidates:
            if one.time_us is not None:
                curves.setdefault(one.algorithm, []).append((size, one.time_us))
    return cost_curves(curves, "all_reduce on 8 H100s, added in any order", least)


def plan() -> Any:
    cluster = Cluster(load_machine("hgx-h100"), 2, load_network("ndr-rail"))
    title = "7 B parameters, 4096 tokens per rank and step, 2 x 8 H100s, NDR"
    return plan_bars(Planner(MODEL, cluster).all(), title)


def mapping() -> Any:
    cluster = Cluster(load_machine("hgx-h100"), 8, load_network("ndr-rail"))
    pairs = [(size, mapping_us("all_reduce", cluster, 8, size)) for size in sizes(12, 28, 4)]
    curves = {
        "groups of neighbours": [(float(size), near_us) for size, (near_us, _) in pairs],
        "dealt out over the nodes": [(float(size), far_us) for size, (_, far_us) in pairs],
    }
    return cost_curves(curves, "all_reduce in 8 groups of 8, on 8 nodes of 8 H100s")


def buckets() -> Any:
    """Draw the gradients of a 7B model on 32 GPUs at 200 GB/s, behind 320 ms of backward."""
    layers = [Layer(14e9 / 32, 10e3)] * 32
    gpus = Constants(5, 1 / 200e3)

    def cost_us(size: float) -> float:
        return estimate_us("all_reduce", "ring", 32, size, gpus)

    found = overlap(layers, best_bucket_bytes(layers, cost_us), cost_us)
    return bucket_times(found, "Gradients of a 7B model behind its backward pass, 32 GPUs")


PICTURES: dict[str, Callable[[], Any]] = {
    "all_reduce": all_reduce,
    "ring": lambda: schedule("ring"),
    "two_shot": lambda: schedule("two_shot"),
    "rabenseifner": lambda: schedule("rabenseifner"),
    "tree": lambda: schedule("tree"),
    "bruck": lambda: schedule("bruck", "all_gather"),
    "tiers": tiers,
    "costs": costs,
    "published": lambda: published_times(
        held_out_rows(), "Published times of sizes that the fit did not see"
    ),
    "plan": plan,
    "rings": lambda: ring_paths(
        disjoint_rings(load_machine("dgx-1v")), "DGX-1V: rings of their own wires"
    ),
    "mapping": mapping,
    "buckets": buckets,
}


if __name__ == "__main__":
    for name, make in PICTURES.items():
        save(make(), FOLDER / f"{name}.svg")
        print(f"wrote {FOLDER.name}/{name}.svg")
