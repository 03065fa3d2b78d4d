# SPDX-License-Identifier: Apache-2.0
"""`fastcoll schedule`: watch an algorithm move data, step by step.

Decides the output; the schedule, its proof and its timing are fastcoll_model's.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table

from fastcoll.cli.console import (
    STDOUT,
    JsonFile,
    Plot,
    in_parts,
    make_console,
    make_table,
    matplotlib_is_there,
    parsed,
    write_json,
)
from fastcoll.cli.topologies import MACHINE_HELP, NETWORK_HELP, cluster_for, refusals
from fastcoll.measure.sizes import format_size, parse_size
from fastcoll_model.builders import build
from fastcoll_model.checker import Proof, check
from fastcoll_model.fabric import Fabric, OneSwitch
from fastcoll_model.figures import save
from fastcoll_model.picture import draw, moves, rows
from fastcoll_model.schedule import REDUCTIONS, VERBS, Schedule
from fastcoll_model.simulator import Timing, simulate


def schedule(
    algorithm: Annotated[
        str, typer.Argument(help="ring, two_shot, tree, ...; a wrong name lists them.")
    ],
    verb: Annotated[str, typer.Option(help=", ".join(VERBS))] = "all_reduce",
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Number of ranks.")] = 4,
    root: Annotated[int, typer.Option(min=0, help="Rank that gives or gets.")] = 0,
    segments: Annotated[int, typer.Option(min=1, max=64, help="Pieces that are pipelined.")] = 1,
    size: Annotated[str, typer.Option(help="Size of the message, such as 1M.")] = "1M",
    topology: Annotated[str | None, typer.Option(help=MACHINE_HELP)] = None,
    network: Annotated[str | None, typer.Option(help=NETWORK_HELP)] = None,
    json_path: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Show how an algorithm moves data: each rank's steps, the proof and the time.

    Without --topology on an ideal switch: 1 us and 1 GB/s for every pair.
    """
    size_bytes = parsed(parse_size, size, "--size")
    if plot is not None:
        matplotlib_is_there()
    with refusals():
        fabric: Fabric = OneSwitch(ranks, 1.0, 1e-3)
        local_size = None
        if topology is not None:
            cluster = cluster_for(topology, network, ranks)
            fabric, local_size = cluster, min(ranks, cluster.local_size)
        built = build(
            verb, algorithm, ranks, root=root, num_segments=segments, local_size=local_size
        )
        proof = check(built)
        timing = simulate(built, fabric, size_bytes, trace=True)
    title = f"{verb} by {algorithm}, {ranks} ranks, {format_size(size_bytes)}"
    if json_path != STDOUT:
        _print(built, proof, timing, title)
    write_json(schedule_json(built, proof, timing, size_bytes), json_path)
    if plot is not None:
        save(draw(built, timing, title), plot)
        typer.echo(f"picture: {plot}", err=json_path == STDOUT)


def _print(built: Schedule, proof: Proof, timing: Timing, title: str) -> None:
    console = make_console()
    ranks = [str(rank) for rank in range(built.world_size)]
    for table in in_parts(partial(_table_of, rows(built, timing), title), ranks, console):
        console.print(table)
    typer.echo("+3 <1: adds block 3 of rank 1;  =3 <1: copies it;  3 >1: gives it to rank 1")
    for line in verdict(built, proof, timing):
        typer.echo(line)


def schedule_table(built: Schedule, timing: Timing, title: str) -> Table:
    """Return every rank's steps at each time at which a transfer starts."""
    return _table_of(rows(built, timing), title, [str(rank) for rank in range(built.world_size)])


def _table_of(steps: Sequence[tuple[float, list[str]]], title: str, ranks: Sequence[str]) -> Table:
    table = make_table(title, ("start us", *(f"rank {rank}" for rank in ranks)), ("start us",))
    for start, cells in steps:
        table.add_row(f"{start:.1f}", *(cells[int(rank)] for rank in ranks))
    return table


def schedule_json(built: Schedule, proof: Proof, timing: Timing, size_bytes: int) -> dict[str, Any]:
    """Return a schedule's moves, proof and time; a rank of -1 is every rank, through the switch."""
    return {
        "verb": built.verb,
        "world_size": built.world_size,
        "size_bytes": size_bytes,
        "time_us": timing.time_us,
        "proof": asdict(proof),
        "moves": [
            {
                "start_us": one.event.start_us,
                "end_us": one.event.end_us,
                "source": one.source,
                "target": one.target,
                "blocks": one.blocks,
                "adds": one.adds,
            }
            for one in moves(timing)
        ],
    }


def verdict(built: Schedule, proof: Proof, timing: Timing) -> list[str]:
    """Return the proven facts, the order of summation, and the time."""
    lines = [
        f"proven: {proof.num_steps} steps, {proof.num_signals} signals; every output is right in "
        "every interleaving, no race, no deadlock"
    ]
    first = next(iter(proof.orders.items()), None)
    if built.verb in REDUCTIONS and first is not None:
        kind = "rank order" if proof.rank_order else "not rank order"
        lines.append(f"order of summation ({kind}): block {first[0]} = {first[1]}")
    return [*lines, f"time: {timing.time_us:.2f} us"]
