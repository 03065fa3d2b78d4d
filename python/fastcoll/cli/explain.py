# SPDX-License-Identifier: Apache-2.0
"""`fastcoll explain`: which algorithm a collective would take on a topology, and why.

Decides what is shown; the comparison is fastcoll.model's.
"""

import json
from dataclasses import asdict
from typing import Annotated, Literal, cast

import typer
from rich.table import Table

from fastcoll.cli.console import make_console
from fastcoll.cli.topologies import MACHINE_HELP, NETWORK_HELP, cluster_for, refusals, size_option
from fastcoll.measure.busbw import VERBS as MEASURED
from fastcoll.measure.busbw import busbw_gbps
from fastcoll.measure.sizes import format_size
from fastcoll.model.explain import Comparison, compare
from fastcoll.model.schedule import VERBS
from fastcoll.topology.cluster import Cluster


def explain(
    verb: Annotated[str, typer.Argument(help=", ".join(VERBS))],
    size: Annotated[str, typer.Argument(help="Size of the message, such as 1M.")],
    topology: Annotated[str, typer.Option(help=MACHINE_HELP)],
    ranks: Annotated[int | None, typer.Option(min=1, help="Default: one full node.")] = None,
    network: Annotated[str | None, typer.Option(help=NETWORK_HELP)] = None,
    numerics: Annotated[str, typer.Option(help="same_bits or fast.")] = "same_bits",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare all algorithms of a collective on a topology: admitted or why not, time, choice.

    Times are simulated from the topology's constants; nothing is measured, and no setup cost of a
    call is counted.
    """
    size_bytes = size_option(size, "SIZE")
    if numerics not in ("same_bits", "fast"):
        raise typer.BadParameter("write same_bits or fast", param_hint="--numerics")
    with refusals():
        cluster = cluster_for(topology, network, ranks)
        kind = cast(Literal["same_bits", "fast"], numerics)
        found = compare(verb, cluster, ranks or cluster.num_ranks, size_bytes, kind)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
        return
    _print(found, cluster)


def _print(found: Comparison, cluster: Cluster) -> None:
    where = cluster.machine.title
    if cluster.network is not None and cluster.num_nodes > 1:
        where = f"{cluster.num_nodes} x {where}, {cluster.network.title}"
    size = format_size(found.size_bytes)
    table = Table(
        title=f"{found.verb} of {size} on {found.world_size} ranks: {where}", title_justify="left"
    )
    for name, justify in (
        ("algorithm", "left"),
        ("time us", "right"),
        ("busbw GB/s", "right"),
        ("of the limit", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for candidate in found.candidates:
        if candidate.time_us is None:
            table.add_row(candidate.algorithm, "", "", "", candidate.reason)
            continue
        busbw = ""
        if found.verb in MEASURED:
            rate = busbw_gbps(found.verb, found.size_bytes, candidate.time_us, found.world_size)
            busbw = f"{rate:.3g}"
        share = found.least_us / candidate.time_us if candidate.time_us else 1.0
        segments = candidate.num_segments
        table.add_row(
            candidate.algorithm,
            f"{candidate.time_us:.4g}",
            busbw,
            f"{share:.0%}",
            f"{segments} segments" if segments > 1 else "",
        )
    console = make_console()
    console.print(table)
    best = found.best
    console.print(
        f"choice: [bold]{best.algorithm}[/bold]; no algorithm can take less than "
        f"{found.least_us:.4g} us here",
        highlight=False,
    )
