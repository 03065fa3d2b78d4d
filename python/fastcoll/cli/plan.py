# SPDX-License-Identifier: Apache-2.0
"""`fastcoll plan`: the cost of each parallel strategy on a cluster.

Decides options and output; the prices are fastcoll_model's.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fastcoll.cli.console import (
    STDOUT,
    ExitCode,
    JsonFile,
    Plot,
    fits,
    make_console,
    make_table,
    matplotlib_is_there,
    parsed,
    write_json,
)
from fastcoll.cli.topologies import MACHINE_HELP, NETWORK_HELP, cluster_for, refusals
from fastcoll.measure.sizes import format_number, parse_count
from fastcoll_model.charts import plan_bars
from fastcoll_model.figures import save
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.mapping import Mapped, axes_of, mappings
from fastcoll_model.placement import mapping_us
from fastcoll_model.strategies import Phrase, Planner, Sentence, Workload


def plan(
    topology: Annotated[str, typer.Option(help=MACHINE_HELP)],
    params: Annotated[str, typer.Option(help="Parameters of the model, such as 7B.")],
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")],
    hidden: Annotated[int, typer.Option(min=1, help="Width of the activations.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per rank and step.")] = 4096,
    dtype_bytes: Annotated[int, typer.Option(min=1, max=8, help="2 for bf16.")] = 2,
    utilisation: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the peak that computation reaches.")
    ] = 0.4,
    ranks: Annotated[int | None, typer.Option(min=1, help="Default: one full node.")] = None,
    network: Annotated[str | None, typer.Option(help=NETWORK_HELP)] = None,
    groups: Annotated[
        str, typer.Option(help="Which axes get the neighbours: tensor=8,pipeline=2,data=4, say.")
    ] = "",
    json_path: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Price DDP, ZeRO, FSDP, tensor, sequence, pipeline and expert parallelism for a model.

    Shows the verbs, how often, over how many bytes, on which links, and the time that computation
    hides. With --groups: the cost of dealing out the ranks to these groups in every order. Fails
    where the model fits in no strategy.
    """
    workload = Workload(count_option(params), layers, hidden, tokens, dtype_bytes, utilisation)
    if plot is not None:
        if groups:
            raise typer.BadParameter("strategies are drawn, not --groups", param_hint="--plot")
        matplotlib_is_there()
    with refusals():
        cluster = cluster_for(topology, network, ranks)
        if ranks is not None and ranks < cluster.local_size:
            raise typer.BadParameter("a plan needs whole nodes", param_hint="--ranks")
        if groups:
            found = mappings(axes_of(workload, _sizes(groups)), cluster)
            _print_mappings(found, cluster, json_path)
            return
        sentences = Planner(workload, cluster).all()
    if plot is not None:
        save(plan_bars(sentences, plan_title(workload, cluster)), plot)
    console = make_console(is_silent=json_path == STDOUT)
    table = plan_table(sentences, plan_title(workload, cluster))
    if fits(table, console):
        console.print(table)
    else:
        _print_narrow(sentences, plan_title(workload, cluster), console)
    for line in remarks(sentences, workload, cluster):
        console.print(line)
    write_json(plan_json(sentences), json_path)
    if all(one.problem for one in sentences):
        raise typer.Exit(ExitCode.FAILED)


def _print_narrow(sentences: list[Sentence], title: str, console: Console) -> None:
    """Print a table of the numbers, and below it the phrases of each strategy, a line each."""
    console.print(plan_table(sentences, title, with_phrases=False))
    for one in sentences:
        console.print(f"[bold]{one.strategy}[/bold]")
        for line in _phrases(one):
            console.print(f"  {line}")


def _sizes(text: str) -> dict[str, int]:
    pairs = [word.partition("=") for word in text.split(",")]
    if not all(size.isdigit() for _, _, size in pairs):
        raise typer.BadParameter("write axis=ranks,axis=ranks", param_hint="--groups")
    return {name: int(size) for name, _, size in pairs}


def _print_mappings(found: list[Mapped], cluster: Cluster, json_path: Path | None) -> None:
    write_json([{**asdict(one), "time_us": one.time_us} for one in found], json_path)
    title = f"{cluster.num_ranks} ranks: {cluster.num_nodes} x {cluster.machine.name}"
    axes = sorted(found[0].order)
    numbers = (*axes, "all", "of the best")
    columns = ("neighbours first", *numbers)
    table = make_table(f"{title}, ms of communication per step", columns, numbers)
    for one in found:
        times = [format_number(one.axis_us[name] / 1e3) for name in axes]
        ratio = one.time_us / found[0].time_us if found[0].time_us else 1.0
        table.add_row(
            ", ".join(one.order),
            *times,
            format_number(one.time_us / 1e3),
            f"{format_number(ratio)}x",
        )
    make_console(is_silent=json_path == STDOUT).print(table)


def count_option(text: str) -> int:
    """Return the number of parameters that --params gives."""
    count = parsed(parse_count, text, "--params")
    if count == 0:
        raise typer.BadParameter("a model has parameters", param_hint="--params")
    return count


def plan_json(sentences: list[Sentence]) -> list[dict[str, Any]]:
    """Return all strategies as JSON has them."""
    return [
        {**asdict(one), "exposed_us": one.exposed_us, "efficiency": one.efficiency}
        for one in sentences
    ]


def plan_title(workload: Workload, cluster: Cluster) -> str:
    where = f"{cluster.num_nodes} x {cluster.machine.name}"
    if cluster.num_nodes > 1 and cluster.network is not None:
        where += f", {cluster.network.name}"
    return (
        f"{workload.num_params / 1e9:g} B parameters, {workload.tokens} tokens per rank and step, "
        f"{cluster.num_ranks} ranks: {where}"
    )


def remarks(sentences: list[Sentence], workload: Workload, cluster: Cluster) -> list[str]:
    """Return the assumptions behind the times, and the cost of a careless mapping."""
    lines = [
        f"computation: {format_number(sentences[0].compute_us / 1e3, 4)} ms per step at "
        f"{workload.utilisation:.0%} of {cluster.machine.tflops:g} TFLOP/s"
    ]
    if all(one.problem for one in sentences):
        least_gb = min(one.memory_gb for one in sentences)
        lines.append(
            f"nothing fits: {least_gb:.0f} GB of a rank's {cluster.machine.memory_gb:g} GB are the "
            "least; share the model among more ranks, or take one with fewer parameters"
        )
    if cluster.num_nodes > 1:
        near_us, far_us = mapping_us("all_reduce", cluster, cluster.local_size, 64e6)
        lines.append(
            "placement: tensor and expert groups are neighbours here; dealt out over the nodes "
            f"their all_reduce of 64 MB takes {format_number(far_us / near_us)} times as long"
        )
    return lines


def plan_table(sentences: list[Sentence], title: str, with_phrases: bool = True) -> Table:
    """Return the table of strategies: verbs, bytes moved, waits and memory."""
    numbers = ("moving\nms", "exposed\nms", "GB per\nrank", "efficiency")
    verbs = ["verbs per step"] if with_phrases else []
    table = make_table(title, ("strategy", *verbs, *numbers), numbers)
    for one in sentences:
        moving_us = sum(phrase.time_us for phrase in one.phrases)
        result = f"[red]{one.problem}[/red]" if one.problem else f"{one.efficiency:.0%}"
        table.add_row(
            one.strategy,
            *(["\n".join(_phrases(one))] if with_phrases else []),
            format_number(moving_us / 1e3),
            format_number(one.exposed_us / 1e3),
            format_number(one.memory_gb),
            result,
        )
        table.add_section()
    return table


def _phrases(one: Sentence) -> list[str]:
    """Return the calls of a strategy's step, a line each, and its idle time."""
    said = [_said(phrase) for phrase in one.phrases] or ["nothing"]
    return said + [f"bubble {format_number(one.bubble_us / 1e3)} ms"] * bool(one.bubble_us)


def _said(phrase: Phrase) -> str:
    amount = phrase.size_bytes / 1e6
    size = f"{format_number(amount)} MB" if amount < 1e3 else f"{format_number(amount / 1e3)} GB"
    return f"{phrase.times} x {phrase.verb} of {size} in {phrase.ranks}, {phrase.links}"
