# SPDX-License-Identifier: Apache-2.0
"""How pictures of the model are made and saved. Decides their form, not their content.

The same picture is the same file: no date, no random ids, text as text. Needs matplotlib.
"""

import io
from pathlib import Path
from typing import Any

_SETTINGS: Any = {"svg.hashsalt": "fastcoll", "svg.fonttype": "none"}


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure of so many inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG, PNG or PDF, by the path's ending; make the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(figure, path, path.suffix[1:])


def as_svg(figure: Any) -> str:
    """Return a figure as the text of an SVG."""
    text = io.StringIO()
    _write(figure, text, "svg")
    return text.getvalue()


def _write(figure: Any, target: Any, kind: str) -> None:
    import matplotlib as mpl

    dates = {"svg": "Date", "pdf": "CreationDate"}
    metadata = {dates[kind]: None} if kind in dates else {}
    with mpl.rc_context(_SETTINGS):
        figure.savefig(target, format=kind, dpi=120, metadata=metadata)
