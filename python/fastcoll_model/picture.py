# SPDX-License-Identifier: Apache-2.0
"""A schedule in space and time, as text and as a picture. Decides how it looks, nothing else."""

from typing import Any, NamedTuple

from fastcoll_model.figures import new_figure
from fastcoll_model.schedule import EVERY, Copy, Reduce, Schedule, Span, moved
from fastcoll_model.simulator import Event, Timing


class Move(NamedTuple):
    """Blocks on their way from one rank to another."""

    source: int
    target: int
    blocks: str
    adds: bool
    event: Event


def moves(timing: Timing) -> list[Move]:
    """Return the moves between ranks, in the order of time."""
    found = []
    for event in timing.events:
        if isinstance(event.step, Copy | Reduce):
            adds = isinstance(event.step, Reduce)
            for source, target in moved(event.step):
                name = _blocks(source)
                found.append(Move(source.rank, target.rank, name, adds, event))
    return sorted(found, key=lambda move: (move.event.start_us, move.event.rank))


def _blocks(span: Span) -> str:
    last = span.start + span.num_blocks - 1
    return str(span.start) if last == span.start else f"{span.start}-{last}"


def rows(schedule: Schedule, timing: Timing) -> list[tuple[float, list[str]]]:
    """Return (start, one cell per rank) for every time at which something starts to move.

    A cell is the step of its rank: `+3 <1` adds block 3 of rank 1, `=3 <1` takes it, `3 >1` gives
    block 3 to rank 1; `*` is every rank, through the switch.
    """
    table: list[tuple[float, list[str]]] = []
    for move in moves(timing):
        start = move.event.start_us
        if not table or start > table[-1][0] * (1 + 1e-9) + 1e-9:
            table.append((start, [""] * schedule.world_size))
        me = move.event.rank
        if move.source == me:
            text = f"{move.blocks} >{_name(move.target)}"
        else:
            text = f"{'+' if move.adds else '='}{move.blocks} <{_name(move.source)}"
        cell = table[-1][1][me]
        table[-1][1][me] = f"{cell}, {text}" if cell else text
    return table


def _name(rank: int) -> str:
    return "*" if rank == EVERY else str(rank)


def draw(schedule: Schedule, timing: Timing, title: str) -> Any:
    """Draw the space-time diagram: one line per rank, one arrow per transfer. Needs matplotlib."""
    import matplotlib as mpl

    n = schedule.world_size
    figure, axis = new_figure(11, 1.4 + 0.8 * n)
    colours = mpl.colormaps["tab10"]
    for rank in range(n):
        axis.axhline(rank, color="0.8", linewidth=1, zorder=0)
    few = sum(1 for _ in moves(timing)) <= 120
    for move in moves(timing):
        ends = [range(n) if rank == EVERY else [rank] for rank in (move.source, move.target)]
        start, end = move.event.start_us, move.event.end_us
        colour = colours(int(move.blocks.split("-")[0]) % 10)
        for source in ends[0]:
            for target in ends[1]:
                style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6}
                axis.annotate("", (end, target), (start, source), arrowprops=style)
        if few:
            # Near its beginning, as arrows cross in the middle.
            ranks = [sum(each) / len(each) for each in ends]
            place = start + (end - start) * 0.18, ranks[0] + (ranks[1] - ranks[0]) * 0.18
            text = f"{'+' if move.adds else ''}{move.blocks}"
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            style = {"fontsize": 8, "color": colour, "bbox": box}
            axis.text(*place, text, ha="center", va="center", **style)
    axis.set_xlim(0, timing.time_us * 1.02)
    axis.set_ylim(n - 0.5, -0.5)
    axis.set_yticks(range(n), [f"rank {rank}" for rank in range(n)])
    axis.set_xlabel("time, us")
    axis.spines["left"].set_visible(False)
    axis.set_title(title, fontsize=11)
    return figure
