# SPDX-License-Identifier: Apache-2.0
"""`fastcoll tune`: measure which algorithm is best when on this machine.

Decides options and what is shown. What is measured is fastcoll.measure's matter.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fastcoll import env
from fastcoll.algorithms import shared
from fastcoll.cli.console import complain, make_console, quiet_progress
from fastcoll.measure.pattern import Cell
from fastcoll.measure.pool import NotMeasured, available_cpus
from fastcoll.measure.sizes import format_size, parse_sizes
from fastcoll.measure.tune import TuneSettings, run_tune
from fastcoll.measure.variants import VERBS

_SIZES = "64,512,2K,4K,8K,16K,64K,128K,256K,512K,1M,4M,16M"
Json = dict[str, Any]


def default_worlds() -> list[int]:
    """Return 2, 4, 8... up to a rank on every CPU; and on small machines twice that many."""
    num_cpus = len(available_cpus())
    most = num_cpus if num_cpus >= 4 else 2 * num_cpus
    return [world for world in (2, 4, 8, 16, 32, 64) if world <= max(2, most)]


def tune(
    out: Annotated[Path, typer.Option(help="The table to write, or to go on with.")] = Path(
        "fastcoll-tuning.json"
    ),
    ranks: Annotated[
        str, typer.Option(help="Group sizes, such as 2,4,8; default: powers of 2 that fit.")
    ] = "",
    sizes: Annotated[str, typer.Option(help="BEGIN:END:FACTOR or A,B,C.")] = _SIZES,
    verbs: Annotated[str, typer.Option(help="Some of the verbs, separated by commas.")] = ",".join(
        VERBS
    ),
    minutes: Annotated[
        float, typer.Option(min=0.05, help="Stop after this long; run again to go on.")
    ] = 4.5,
) -> None:
    """Measure every verb, algorithm and segment size, fit the cost model, and write both down.

    Every variant's result is checked before it is timed, and the variants take turns. Groups choose
    by the table once FASTCOLL_TUNING names it on all their ranks. Nothing else should run then.
    """
    settings = TuneSettings(
        worlds_option(ranks), sizes_option(sizes), verbs_option(verbs), 60 * minutes
    )
    with (
        tempfile.TemporaryDirectory(prefix="fc") as folder,
        quiet_progress("starting", len(settings.cells())) as progress,
    ):
        points: set[Cell] = set()

        def on_point(cell: Cell, variant: str) -> None:
            points.add(cell)
            text = f"{cell.verb}, {cell.world_size} ranks, {format_size(cell.size_bytes)}"
            task = progress.task_ids[0]
            progress.update(task, description=f"{text}, {variant}", completed=len(points))
            progress.refresh()

        try:
            document = run_tune(settings, out, Path(folder), on_point, shared.CPU)
        except NotMeasured as error:
            complain(f"nothing more is measured: {error}")
            raise typer.Exit(1) from None
    _print(document, out)


def worlds_option(text: str) -> tuple[int, ...]:
    """Return the group sizes of an option; what fits this machine if it is empty."""
    try:
        worlds = [int(word) for word in text.split(",")] if text else default_worlds()
    except ValueError:
        worlds = []
    if not worlds or not all(2 <= world <= 64 for world in worlds):
        raise typer.BadParameter("write numbers from 2 to 64", param_hint="--ranks")
    return tuple(dict.fromkeys(worlds))


def sizes_option(text: str) -> tuple[int, ...]:
    """Return the sizes of an option, ascending."""
    try:
        return tuple(parse_sizes(text))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--sizes") from None


def verbs_option(text: str) -> tuple[str, ...]:
    """Return the verbs of an option."""
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in VERBS]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is not one of {', '.join(VERBS)}", param_hint="--verbs"
        )
    return names


def _print(document: Json, path: Path) -> None:
    console = make_console()
    console.print(fastest_table(document))
    console.print(fit_of(document), highlight=False)
    if not document["is_complete"]:
        console.print("not complete: run the command again to go on", highlight=False)
    console.print(
        f"table: {path}; groups use it with {env.TUNING.name}={path.name} on every rank",
        highlight=False,
    )


def fastest_table(document: Json) -> Table:
    """Return which variant a tuning table has as the fastest, from which size to which."""
    table = Table(title="fastest, by size of what a rank publishes", title_justify="left")
    for name in ("verb", "ranks", "from", "to", "algorithm", "us"):
        table.add_column(name, justify="left" if name in ("verb", "algorithm") else "right")
    for run in _winners(document["rows"]):
        table.add_row(*run)
    return table


def fit_of(document: Json) -> str:
    """Return the constants fitted to a tuning table, and how well they fit."""
    costs = document["costs"]
    return (
        f"fitted: flag {costs['flag_us']:g} us, waiting for a CPU {costs['switch_us']:g} us, copy "
        f"{_gbps(costs['copy_us_per_byte'])}, a peer's bytes {_gbps(costs['peer_us_per_byte'])}, "
        f"adding {_gbps(costs['reduce_us_per_byte'])}; the model is off by "
        f"{document['fit']['median_error']:.0%} (median)"
    )


def _gbps(us_per_byte: float) -> str:
    return f"{1e-3 / us_per_byte:.3g} GB/s" if us_per_byte else "free"


def _winners(rows: list[Json]) -> list[list[str]]:
    """Return one line per run of sizes that one variant wins."""
    best: dict[tuple[str, int, int], Json] = {}
    for row in rows:
        key = (row["verb"], row["world_size"], row["size_bytes"])
        if key not in best or row["time_us"] < best[key]["time_us"]:
            best[key] = row
    several = Counter((row["verb"], row["world_size"], row["size_bytes"]) for row in rows)
    runs: list[list[Any]] = []
    for key, row in best.items():
        shows_segment = several[key] > 1 and row["size_bytes"] > row["segment_bytes"]
        segment = f", segments of {format_size(row['segment_bytes'])}" if shows_segment else ""
        name = f"{row['algorithm']}{segment}"
        if runs and runs[-1][:2] == [key[0], key[1]] and runs[-1][4] == name:
            runs[-1][3], runs[-1][6] = key[2], row["time_us"]
        else:
            runs.append([key[0], key[1], key[2], key[2], name, row["time_us"], row["time_us"]])
    return [
        [verb, str(world), format_size(low), format_size(high), name, f"{first:.4g} to {last:.4g}"]
        for verb, world, low, high, name, first, last in runs
    ]
