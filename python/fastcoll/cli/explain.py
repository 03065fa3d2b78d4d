# SPDX-License-Identifier: Apache-2.0
"""`fastcoll explain`: which algorithm a collective takes, and why: here, or on a topology on paper.

Decides the output. The comparison is fastcoll_model's, the choice here fastcoll.choose's.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.table import Table

from fastcoll import env
from fastcoll.choose import algorithms, select, tuning
from fastcoll.choose.tuning import Tuning
from fastcoll.cli.bench import Device
from fastcoll.cli.console import (
    STDOUT,
    JsonFile,
    end_without,
    make_console,
    make_table,
    parsed,
    write_json,
)
from fastcoll.cli.probes import try_peer
from fastcoll.cli.topologies import MACHINE_HELP, NETWORK_HELP, cluster_for, refusals
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.machine import gpu
from fastcoll.measure.busbw import VERBS as MEASURED
from fastcoll.measure.busbw import busbw_gbps
from fastcoll.measure.pattern import make_cell
from fastcoll.measure.pool import available_cpus
from fastcoll.measure.sizes import format_number, format_size, parse_size
from fastcoll.measure.variants import request_of
from fastcoll.native import _C
from fastcoll.types import Numerics, Request, SingleCopy
from fastcoll_model.errors import did_you_mean
from fastcoll_model.explain import Comparison, compare
from fastcoll_model.libraries import Offer, offers
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.schedule import REDUCTIONS, VERBS


def explain(
    verb: Annotated[str, typer.Argument(help=", ".join(VERBS))],
    size: Annotated[str, typer.Argument(help="Size of the message, such as 1M.")],
    topology: Annotated[
        str | None, typer.Option(help=f"{MACHINE_HELP} Default: this machine, for real.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Default: one full node; here: a rank on every CPU.")
    ] = None,
    network: Annotated[str | None, typer.Option(help=NETWORK_HELP)] = None,
    numerics: Annotated[str, typer.Option(help="same_bits or fast.")] = "same_bits",
    device: Annotated[Device, typer.Option(help="Where the tensors are, here.")] = Device.cpu,
    json_path: JsonFile = None,
) -> None:
    """Compare all algorithms of a collective: admitted or why not, time, choice.

    On a topology, times are simulated from its constants, and nothing is measured. The cost
    of a library's call stands beside them, where it was measured. Without a topology: the choice of
    a group of this machine for a float32 SUM. It is made by the tuning table that FASTCOLL_TUNING
    names, else by the model. The driver says which GPUs reach each other's memory.
    """
    size_bytes = parsed(parse_size, size, "SIZE")
    if topology is None and device is Device.cuda and (problem := gpu.problem()):
        end_without(f"GPUs can't be asked: {problem}")
    if numerics not in ("same_bits", "fast"):
        raise typer.BadParameter("write same_bits or fast", param_hint="--numerics")
    kind = cast(Numerics, numerics)
    if topology is None:
        with refusals():
            on_gpus = device is Device.cuda
            least = max(2, len(gpu.gpus() if on_gpus else available_cpus()))
            _explain_here(verb, size_bytes, ranks or least, kind, json_path, on_gpus=on_gpus)
        return
    with refusals():
        cluster = cluster_for(topology, network, ranks)
        found = compare(verb, cluster, ranks or cluster.num_ranks, size_bytes, kind)
        others = libraries(found, cluster, kind)
    if json_path != STDOUT:
        _print(found, others, cluster)
    write_json({**asdict(found), "libraries": [asdict(one) for one in others]}, json_path)


def _on_gpus(request: Request) -> Request:
    """Return the request of ranks on this machine's GPUs."""
    gpu.require()
    gpus = gpu.gpus()
    ranks_per_gpu = -(-request.world_size // len(gpus))
    no_multicast = [one.no_multicast for one in gpus[: request.world_size]]
    return replace(
        request,
        num_channels=env.GPU_CHANNELS.get() or gpu.USUAL_CHANNELS,
        ranks_per_gpu=ranks_per_gpu,
        reaches_peers=not gpu.pairs_without_access(),
        no_nccl=gpu.nccl_problem([gpu.nccl_name()], ranks_per_gpu),
        no_multicast=gpu.multicast_problem(no_multicast, ranks_per_gpu),
    )


def _explain_here(
    verb: str,
    size_bytes: int,
    world_size: int,
    numerics: Numerics,
    json_path: Path | None,
    *,
    on_gpus: bool,
) -> None:
    if verb not in VERBS:
        raise UsageError(
            f"no verb {verb!r}{did_you_mean(verb, VERBS)}; the verbs are {', '.join(VERBS)}"
        )
    if world_size > _C.K_MAX_WORLD:
        raise UnsupportedError(
            f"{world_size} ranks: at most {_C.K_MAX_WORLD} share a region, and more are several "
            "nodes, which --topology and --network describe"
        )
    tuned = tuning.find()
    cell = make_cell(verb, "float32", "sum", size_bytes, world_size)
    asked = cast(SingleCopy, env.SINGLE_COPY.get())
    request = request_of(cell, numerics, single_copy=asked if try_peer().reads_us else "never")
    if on_gpus:
        request = _on_gpus(request)
        if tuned.table and (problem := tuned.problem_on_gpus()):
            tuned = Tuning(None, f"the model, not {tuned.reason}: {problem}")
    choice = select(request, algorithms.ALL, tuned.table)
    entry = {"choice": choice.plan.describe(), "reasons": choice.reasons}
    write_json({**entry, "tuning": tuned.reason}, json_path)
    console = make_console(is_silent=json_path == STDOUT)
    cpus, gpus = f"{request.num_cpus} CPUs", f"GPUs, {request.ranks_per_gpu} on each"
    where = f"{world_size} ranks on {gpus if on_gpus else cpus}"
    names = ("algorithm", "time, or why not")
    table = make_table(f"{verb} of {format_size(size_bytes)}: {where}", names)
    for reason, same in _folded(choice.reasons).items():
        table.add_row("\n".join(same), reason)
    console.print(table)
    console.print(f"choice: [bold]{choice.plan.describe()}[/bold]")
    console.print(f"chosen by: {tuned.reason}")


def _print(found: Comparison, others: list[Offer], cluster: Cluster) -> None:
    console = make_console()
    console.print(comparison_table(found, cluster))
    for line in [choice(found), *refused(found)]:
        console.print(line)
    console.print(library_table(others))
    for line in sources(others):
        console.print(line)


def libraries(found: Comparison, cluster: Cluster, numerics: Numerics) -> list[Offer]:
    """Return the time that each library can reach for the same call."""
    if numerics == "fast" or found.verb not in REDUCTIONS:
        return offers(found, found, cluster)
    fast = compare(found.verb, cluster, found.world_size, found.size_bytes, "fast")
    return offers(found, fast, cluster)


def library_table(others: list[Offer]) -> Table:
    """Return the table of what libraries can reach: simulated wires beside measured calls."""
    numbers = ("wires us", "a call us")
    title = "libraries, not ranked: simulated time on the wires, measured cost of a call"
    table = make_table(title, ("library", "algorithm", *numbers), numbers)
    for one in others:
        if one.wires_us is not None:
            call = "not measured" if one.call_us is None else format_number(one.call_us)
            table.add_row(one.library, one.algorithm, format_number(one.wires_us, 4), call)
    return table


def sources(others: list[Offer]) -> list[str]:
    """Return the remarks on libraries, a line each."""
    return [f"{one.library}: {one.remark}" for one in others if one.remark]


def choice(found: Comparison) -> str:
    """Return the chosen algorithm, and the least time of any algorithm, as text."""
    return (
        f"choice: [bold]{found.best.algorithm}[/bold]; no algorithm can take less than "
        f"{format_number(found.least_us, 4)} us here"
    )


def comparison_table(found: Comparison, cluster: Cluster) -> Table:
    """Return the candidates that were priced, with bandwidth and share of the limit."""
    where = cluster.machine.title
    if cluster.network is not None and cluster.num_nodes > 1:
        where = f"{cluster.num_nodes} x {where}, {cluster.network.title}"
    size = format_size(found.size_bytes)
    numbers = ("time us", "busbw GB/s", "of the limit")
    title = f"{found.verb} of {size} on {found.world_size} ranks: {where}"
    table = make_table(title, ("algorithm", *numbers, "segments"), (*numbers, "segments"))
    for candidate in found.candidates:
        if candidate.time_us is None:
            continue
        busbw = ""
        if found.verb in MEASURED:
            rate = busbw_gbps(found.verb, found.size_bytes, candidate.time_us, found.world_size)
            busbw = format_number(rate)
        share = found.least_us / candidate.time_us if candidate.time_us else 1.0
        time_us, segments = format_number(candidate.time_us, 4), str(candidate.num_segments)
        table.add_row(candidate.algorithm, time_us, busbw, f"{share:.0%}", segments)
    return table


def refused(found: Comparison) -> list[str]:
    """Return why the other candidates were refused, a line for each reason."""
    reasons = {one.algorithm: one.reason for one in found.candidates if one.time_us is None}
    return [f"refused: {', '.join(names)}: {why}" for why, names in _folded(reasons).items()]


def _folded(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names that have the same reason, by reason."""
    folded: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        folded.setdefault(reason, []).append(name)
    return folded
