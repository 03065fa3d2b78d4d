# SPDX-License-Identifier: Apache-2.0
"""`fastcoll report`: everything the model says of a topology, in one page.

Decides the contents of the page. Tables and lines are those that the other commands print.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastcoll.cli.console import (
    STDOUT,
    JsonFile,
    make_table,
    matplotlib_is_there,
    writable,
    write_json,
)
from fastcoll.cli.explain import choice, comparison_table, library_table, refused, sources
from fastcoll.cli.findings import Findings, find_all
from fastcoll.cli.html import Section, page
from fastcoll.cli.plan import count_option, plan_table, plan_title, remarks
from fastcoll.cli.regret import regret_table, score, without_choice
from fastcoll.cli.schedule import schedule_table, verdict
from fastcoll.cli.topo import MAX_MATRIX, bandwidth_matrix, machine_tree, network_tree, rings_of
from fastcoll.cli.topologies import MACHINE_HELP, NETWORK_HELP, cluster_for, refusals
from fastcoll.cli.tune import fastest_table, fit_of, gpus_of
from fastcoll.measure.sizes import format_number, format_size
from fastcoll_model.builders import build
from fastcoll_model.charts import cost_curves, plan_bars, published_times
from fastcoll_model.checker import check
from fastcoll_model.fabric import OneSwitch
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.picture import draw
from fastcoll_model.published import median_error
from fastcoll_model.simulator import simulate
from fastcoll_model.strategies import Workload

_DRAWN = ("one_shot", "two_shot", "ring", "double_binary_tree", "rabenseifner")
_DRAWN_RANKS = 4
Json = dict[str, Any]


def report(
    out: Annotated[
        Path, typer.Option("--out", "-o", callback=writable, help="The page to write.")
    ] = Path("fastcoll-report.html"),
    topology: Annotated[str, typer.Option(help=MACHINE_HELP)] = "hgx-h100",
    network: Annotated[str | None, typer.Option(help=NETWORK_HELP)] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Default: one full node.")] = None,
    params: Annotated[str, typer.Option(help="Parameters of the model to plan for.")] = "7B",
    layers: Annotated[int, typer.Option(min=1, help="Its layers.")] = 32,
    hidden: Annotated[int, typer.Option(min=1, help="Width of its activations.")] = 4096,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per rank and step.")] = 4096,
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="Show a file of `fastcoll regret` or `fastcoll tune`; may be repeated."),
    ] = None,
    json_path: JsonFile = None,
) -> None:
    """Write one page with all that is known of a topology before anything runs on it.

    It shows the wiring, how algorithms move data, their cost, how well published times are
    predicted, and the cost of parallel training. The page needs no network to be read.
    """
    matplotlib_is_there()
    with refusals():
        cluster = cluster_for(topology, network, ranks)
        workload = Workload(count_option(params), layers, hidden, tokens)
        found = find_all(cluster, ranks or cluster.num_ranks, workload, measured or [])
    machine = cluster.machine.title
    lines = [f"{cluster.num_nodes} x {machine}, {ranks or cluster.num_ranks} ranks"]
    lines.append(
        "Times are the model's, from the topology's constants, but where it says measured."
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(f"fastcoll on {topology}", lines, _sections(found)), encoding="utf-8")
    if json_path != STDOUT:
        typer.echo(f"report: {out}")
    write_json(found.as_json(), json_path)


def _sections(found: Findings) -> list[Section]:
    sections = [_topology(found.cluster), _schedules(), _costs(found), _choices(found)]
    if found.unfitted:
        sections.append(_published(found))
    sections.append(_plan(found))
    if found.measured:
        sections.append(measured_section(found.measured))
    return sections


def _topology(cluster: Cluster) -> Section:
    machine = cluster.machine
    parts: list[Any] = [machine_tree(machine)]
    if len(machine.ranks) <= MAX_MATRIX:
        parts += [bandwidth_matrix(machine), *rings_of(machine)]
    if cluster.network is not None:
        parts.append(network_tree(cluster.network))
    return Section("Topology", parts)


def _schedules() -> Section:
    parts: list[Any] = [
        f"Algorithms of all_reduce on {_DRAWN_RANKS} ranks and an ideal switch, 1 us and 1 GB/s "
        "for every pair, 1 MiB. +3 <1: adds block 3 of rank 1; =3 <1: copies it."
    ]
    for algorithm in _DRAWN:
        built = build("all_reduce", algorithm, _DRAWN_RANKS)
        timing = simulate(built, OneSwitch(_DRAWN_RANKS, 1.0, 1e-3), 1 << 20, trace=True)
        title = f"all_reduce by {algorithm}"
        parts += [draw(built, timing, title), schedule_table(built, timing, title)]
        parts += verdict(built, check(built), timing)
    return Section("How algorithms move data", parts)


def _costs(found: Findings) -> Section:
    curves: dict[str, list[tuple[float, float]]] = {}
    for one in found.curve:
        for candidate in one.candidates:
            if candidate.time_us is not None:
                point = (one.size_bytes, candidate.time_us)
                curves.setdefault(candidate.algorithm, []).append(point)
    least: list[tuple[float, float]] = [(one.size_bytes, one.least_us) for one in found.curve]
    title = "Time of all_reduce, added in any order"
    sizes = [format_size(one.size_bytes) for one in found.curve]
    table = make_table(f"{title}, us", ("algorithm", *sizes), sizes)
    for name, curve in {**curves, "least possible": least}.items():
        known = dict(curve)
        times = [known.get(one.size_bytes) for one in found.curve]
        table.add_row(name, *("" if time is None else format_number(time, 4) for time in times))
    return Section("What algorithms cost", [cost_curves(curves, title, least), table])


def _choices(found: Findings) -> Section:
    parts: list[Any] = ["Reductions add in rank order here, as fastcoll does by default."]
    for one, others in zip(found.tables, found.others, strict=True):
        parts += [comparison_table(one, found.cluster), choice(one), *refused(one)]
        parts += [library_table(others), *sources(others)]
    return Section("Which algorithm is chosen, and why", parts)


def _published(found: Findings) -> Section:
    parts: list[Any] = []
    for title, rows in (
        ("One alpha and one beta per system, fitted to the sizes between", found.fitted),
        ("The topology's constants alone, fitted to nothing", found.unfitted),
    ):
        numbers = ("size", "published us", "predicted us", "error")
        columns = ("system", *numbers, "source")
        table = make_table(f"{title}: median error {median_error(rows):.0%}", columns, numbers)
        for row in rows:
            times = f"{row.published_us:g}", format_number(row.predicted_us)
            cells = row.system, format_size(row.size_bytes), *times, f"{row.error:+.0%}"
            table.add_row(*cells, row.source)
        parts += [published_times(rows, title), table]
    return Section("Against published times", parts)


def _plan(found: Findings) -> Section:
    if found.no_plan:
        return Section("Parallel training", [f"No plan: {found.no_plan}."])
    title = plan_title(found.workload, found.cluster)
    parts: list[Any] = [plan_bars(found.plan, title), plan_table(found.plan, title)]
    return Section("Parallel training", parts + remarks(found.plan, found.workload, found.cluster))


def measured_section(documents: list[Json]) -> Section:
    section = Section("Measured")
    for document in documents:
        machine = f"Measured on {document['machine']['cpu_model']}, {document['date']}: "
        if document.get("kind") == "regret":
            section.parts += [machine + score(document), regret_table(document)]
            section.parts += without_choice(document)
            continue
        if document["rows"]:
            section.parts += [machine + fit_of(document), fastest_table(document)]
        if "gpu" in document:
            part = document["gpu"]
            section.parts += [f"Measured on {gpus_of(part)}, {part['date']}", fastest_table(part)]
    return section
