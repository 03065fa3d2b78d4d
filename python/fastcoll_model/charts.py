# SPDX-License-Identifier: Apache-2.0
"""Charts of the model: costs against size, strategies, buckets, rings.

Decides how they look; the numbers are the callers'. Needs matplotlib.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastcoll_model.buckets import Overlap
from fastcoll_model.figures import new_figure
from fastcoll_model.published import Row
from fastcoll_model.strategies import Sentence

Curve = Sequence[tuple[float, float]]
_MARKERS = "osD^v<>pPX*h"


def cost_curves(curves: Mapping[str, Curve], title: str, least: Curve = ()) -> Any:
    """Draw time (us) against size (bytes), one line for each name; `least`: the lower bound."""
    figure, axis = new_figure(9, 5)
    for number, (name, curve) in enumerate(curves.items()):
        marker, style = _MARKERS[number % len(_MARKERS)], "-" if number < 10 else "--"
        axis.plot(*_columns(curve), label=name, marker=marker, markersize=4, linestyle=style)
    if least:
        axis.plot(*_columns(least), label="least possible", color="black", linestyle=":")
    _sizes(axis, sorted({size for curve in curves.values() for size, _ in curve}))
    axis.set_yscale("log")
    axis.set_ylabel("time, us")
    axis.set_title(title, fontsize=11)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def published_times(rows: Sequence[Row], title: str) -> Any:
    """Draw predicted against published times: points on the line were predicted well."""
    figure, axis = new_figure(9, 5)
    for number, system in enumerate(dict.fromkeys(row.system for row in rows)):
        points = [(r.published_us, r.predicted_us) for r in rows if r.system == system]
        marker = _MARKERS[number % len(_MARKERS)]
        axis.plot(*_columns(points), label=system, marker=marker, markersize=5, linestyle="")
    times = [time_us for row in rows for time_us in (row.published_us, row.predicted_us)]
    ends = [min(times) / 1.5, max(times) * 1.5]
    axis.plot(ends, ends, color="black", linewidth=0.8, label="as published")
    axis.fill_between(
        ends, [e * 0.85 for e in ends], [e * 1.15 for e in ends], color="0.9", label="within 15 %"
    )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("published, us")
    axis.set_ylabel("predicted, us")
    axis.set_title(title, fontsize=11)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def plan_bars(sentences: Sequence[Sentence], title: str) -> Any:
    """Draw the time of a step with each strategy: computation, and exposed communication."""
    figure, axis = new_figure(9, 1.4 + 0.42 * len(sentences))
    names = [one.strategy for one in sentences]
    compute = [one.compute_us / 1e3 for one in sentences]
    exposed = [one.exposed_us / 1e3 for one in sentences]
    fits = [not one.problem for one in sentences]
    axis.barh(names, compute, label="computation", color=["C0" if fit else "0.8" for fit in fits])
    drawn = axis.barh(
        names,
        exposed,
        left=compute,
        label="communication and bubble that nothing hides",
        color=["C1" if fit else "0.65" for fit in fits],
    )
    texts = [one.problem or f"{one.efficiency:.0%}" for one in sentences]
    axis.bar_label(drawn, texts, padding=4, fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.25)
    axis.set_xlabel("time of a step, ms (grey: does not fit into memory)")
    axis.set_title(title, fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def bucket_times(found: Overlap, title: str) -> Any:
    """Draw the backward pass, and the buckets that are reduced beside it."""
    figure, axis = new_figure(9, 2.6)
    axis.barh(["backward pass"], [found.backward_us / 1e3], color="C0")
    for number, bucket in enumerate(found.buckets):
        start, end = bucket.start_us / 1e3, bucket.end_us / 1e3
        colour = "C1" if number % 2 else "C3"
        axis.barh(["all_reduce"], [end - start], left=start, color=colour)
    end_ms = (found.backward_us + found.exposed_us) / 1e3
    axis.axvline(found.backward_us / 1e3, color="black", linewidth=0.8)
    axis.set_xlim(0, end_ms * 1.02)
    axis.invert_yaxis()
    axis.set_xlabel(f"time, ms: {len(found.buckets)} buckets, {found.exposed_us / 1e3:.3g} exposed")
    axis.set_title(title, fontsize=11)
    return figure


def ring_paths(rings: Sequence[tuple[Sequence[str], float]], title: str) -> Any:
    """Draw rings over the same devices, each on a circle's points in the order of the first."""
    figure, axis = new_figure(6.4, 5)
    order = list(rings[0][0])
    angles = {name: 2 * math.pi * i / len(order) for i, name in enumerate(order)}
    places = {name: (math.sin(angle), math.cos(angle)) for name, angle in angles.items()}
    for number, (ring, gbps) in enumerate(rings):
        closed = [*ring, ring[0]]
        style = {"linewidth": 3 - 1.5 * bool(number), "linestyle": "-" if not number else "--"}
        points = [places[name] for name in closed]
        axis.plot(*_columns(points), label=f"{gbps:g} GB/s each way", zorder=1, **style)
    for name, (x, y) in places.items():
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "0.4"}
        axis.text(x, y, name, ha="center", va="center", fontsize=9, bbox=box, zorder=2)
    axis.set_aspect("equal")
    axis.margins(0.15)
    axis.set_axis_off()
    axis.set_title(title, fontsize=11)
    figure.legend(loc="outside lower center", ncols=len(rings), frameon=False)
    return figure


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _sizes(axis: Any, sizes: Sequence[float]) -> None:
    """Put sizes on a logarithmic axis, at most ten of them, in powers of 1024."""
    axis.set_xscale("log", base=2)
    shown = sizes[:: 1 + (len(sizes) - 1) // 10]
    axis.set_xticks(shown, [_size(size) for size in shown])
    axis.minorticks_off()
    axis.set_xlabel("size of the message")
    axis.grid(visible=True, alpha=0.3)


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:g} GiB"
