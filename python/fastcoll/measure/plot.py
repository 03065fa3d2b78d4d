# SPDX-License-Identifier: Apache-2.0
"""Pictures of results, drawn from result documents only."""

from pathlib import Path
from typing import Any

from fastcoll.measure.sizes import format_size

Json = dict[str, Any]


def _new_figure(width: float, height: float) -> tuple[Any, Any, Any]:
    """Return (pyplot, figure, two axes) without needing a display."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(width, height), layout="constrained")
    for axis in axes:
        axis.grid(visible=True, which="major", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return plt, figure, axes


def _save(plt: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_bench(document: Json, path: Path) -> None:
    """Draw time against size for every library, and how many times slower each peer is."""
    plt, figure, (times, ratios) = _new_figure(12, 4.6)
    settings, rows = document["settings"], document["rows"]
    sizes = [row["size_bytes"] for row in rows]
    for library in document["libraries"]:
        name = library["name"]
        points = [
            (row["size_bytes"], cell["time_us"], row["ratios"].get(name, {}).get("median"))
            for row in rows
            for cell in row["cells"]
            if cell["library"] == name and cell["status"] == "measured"
        ]
        if not points:
            continue
        measured, time_us, ratio = zip(*points, strict=True)
        (line,) = times.loglog(measured, time_us, marker="o", markersize=3, label=name)
        if None not in ratio:
            ratios.loglog(
                measured, ratio, marker="o", markersize=3, color=line.get_color(), label=name
            )
    ratios.axhline(1, color="black", linewidth=0.8)
    for axis in (times, ratios):
        axis.set_xticks(sizes, [format_size(size) for size in sizes], rotation=60, fontsize=8)
        axis.minorticks_off()
        axis.set_xlabel("size")
    times.set_ylabel("time per call, us (median of the slowest rank)")
    times.legend(frameon=False)
    ratios.set_ylabel("times slower than fastcoll")
    if ratios.lines[:-1]:
        ratios.legend(frameon=False)
    figure.suptitle(
        f"{settings['verb']} {settings['dtype']} {settings['op']}, {settings['world_size']} ranks "
        f"on {document['machine']['num_usable_cpus']} cores, {settings['level']} level",
        fontsize=11,
    )
    _save(plt, figure, path)


def plot_demo(document: Json, path: Path) -> None:
    """Draw the loss curves of all phases, and the time each step spends communicating."""
    plt, figure, (losses, bars) = _new_figure(11, 4.4)
    styles = {
        "one process": {"color": "black", "linewidth": 4, "alpha": 0.25},
        "gloo": {"linewidth": 1.2, "linestyle": (0, (3, 3))},
    }
    timed = []
    for phase in document["phases"]:
        name = phase["name"]
        losses.plot(phase["losses"], label=name, **styles.get(name, {"linewidth": 1.2}))
        if phase.get("communication_us"):
            timed.append((name, phase["communication_median_us"], phase["compute_median_us"]))
    losses.set_xlabel("step")
    losses.set_ylabel("loss on the whole batch")
    losses.set_yscale("log")
    losses.legend(frameon=False)
    names = [name for name, _, _ in timed]
    milliseconds = [time_us / 1e3 for _, time_us, _ in timed]
    drawn = bars.barh(names, milliseconds, color=["C0", "C1", "C2"][: len(names)])
    bars.bar_label(drawn, fmt=" %.3g ms")
    bars.margins(x=0.2)
    bars.grid(visible=False, axis="y")
    bars.set_xlabel("communication per step, ms (median of the slowest rank)")
    settings = document["settings"]
    bars.set_title(
        f"{settings['gradient_bytes'] / 1e6:.3g} MB of gradients, {settings['world_size']} ranks: "
        f"{document['communication_ratio']:.3g}x less time than Gloo",
        fontsize=10,
    )
    figure.suptitle("Handwritten digits, data-parallel training", fontsize=11)
    _save(plt, figure, path)
