# SPDX-License-Identifier: Apache-2.0
"""`fastcoll topo`: how the ranks of a machine or a cluster are wired.

Decides the output; the topologies are fastcoll_model.machines's.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from fastcoll.cli.console import STDOUT, JsonFile, in_parts, make_console, make_table, write_json
from fastcoll.cli.topologies import HERE, MACHINE_HELP, NETWORK_HELP, machine_named, refusals
from fastcoll.machine.cpu import affinity
from fastcoll_model.machines.described import describe
from fastcoll_model.machines.local import find
from fastcoll_model.machines.machine import (
    MACHINES,
    NETWORKS,
    Machine,
    Network,
    Wire,
    cards_of,
    load_machine,
    load_network,
    machine_file,
    network_file,
)
from fastcoll_model.placement import best_ring, disjoint_rings
from fastcoll_model.rankfile import Launcher, rank_file

MAX_MATRIX = 16


def topo(
    machine: Annotated[str | None, typer.Argument(help=MACHINE_HELP)] = None,
    network: Annotated[str | None, typer.Option(help=NETWORK_HELP)] = None,
    json_path: JsonFile = None,
    hosts: Annotated[
        str, typer.Option(help="Print how to start a rank on every device of these hosts, a,b,...")
    ] = "",
    launcher: Annotated[str, typer.Option(help="Of --hosts: torchrun or openmpi.")] = "torchrun",
) -> None:
    """Show a machine's wires as a tree and a matrix, with the source of every number.

    Without a name: the machines and networks that come with fastcoll. "here" is this machine, as
    far as sysfs and NVML tell. JSON is such a file: a copy to change, or for --topology elsewhere.
    """
    if hosts:
        _print_rank_file(machine, hosts, launcher)
        return
    if json_path is not None and bool(machine) == bool(network):
        raise typer.BadParameter("name a machine or a --network, not both", param_hint="--json")
    console = make_console(is_silent=json_path == STDOUT)
    with refusals():
        if json_path is not None:
            write_json(_document_of(machine, network), json_path)
        if machine == HERE:
            for problem in find(affinity()).problems:
                console.print(f"not found: {problem}", style="yellow")
        found = machine_named(machine) if machine else None
        between = load_network(network) if network else None
    if found is None and between is None:
        console.print(_list())
    if found is not None:
        _print_machine(found, console)
    if between is not None:
        console.print(network_tree(between))


def _print_machine(machine: Machine, console: Console) -> None:
    console.print(machine_tree(machine))
    if len(machine.ranks) <= MAX_MATRIX:
        for table in in_parts(partial(bandwidth_matrix, machine), machine.ranks, console):
            console.print(table)
        for line in rings_of(machine):
            console.print(line)


def _document_of(machine: str | None, network: str | None) -> object:
    """Return the file of a machine or a network that the command names."""
    if machine == HERE:
        return describe(find(affinity()))
    return machine_file(machine) if machine else network_file(network or "")


def _print_rank_file(machine: str | None, hosts: str, launcher: str) -> None:
    if machine is None:
        raise typer.BadParameter("name the machine that the hosts are", param_hint="--hosts")
    if launcher not in ("torchrun", "openmpi"):
        raise typer.BadParameter("write torchrun or openmpi", param_hint="--launcher")
    with refusals():
        text = rank_file(machine_named(machine), hosts.split(","), cast(Launcher, launcher))
    typer.echo(text, nl=False)


def _list() -> Table:
    table = make_table("topologies that come with fastcoll", ("name", "what"))
    for name in MACHINES:
        table.add_row(name, load_machine(name).title)
    table.add_section()
    for name in NETWORKS:
        table.add_row(name, load_network(name).title)
    return table


def machine_tree(machine: Machine) -> Tree:
    tree = Tree(f"[bold]{machine.title}[/bold]", highlight=False)
    rates = f"adds {machine.reduce_gbps:g} GB/s, copies {machine.copy_gbps:g} GB/s"
    tree.add(f"a rank: {rates}, {machine.memory_gb:g} GB\n[dim]{machine.source}[/dim]")
    pairs: dict[Wire, list[str]] = {}
    for (one, other), wire in machine.wires.items():
        if one < other:
            pairs.setdefault(wire, []).append(f"{one}-{other}")
    for wire, between in pairs.items():
        numbers = f"{wire.gbps:g} GB/s each way, {wire.latency_us:g} us"
        branch = tree.add(f"{wire.kind}: {numbers}\n[dim]{wire.source}[/dim]")
        shown = between if len(between) <= MAX_MATRIX else [*between[:3], "...", between[-1]]
        branch.add(" ".join(shown))
    for card, num_ranks in cards_of(machine).items():
        if num_ranks > 1:
            tree.add(f"{card}: shared by {num_ranks} ranks")
    if machine.multicast:
        tree.add(f"{machine.multicast} adds and multicasts")
    return tree


def bandwidth_matrix(machine: Machine, to: Sequence[str] = ()) -> Table:
    """Return the bandwidth from every rank to every other one, or to some."""
    to = to or machine.ranks
    title = "GB/s from rank to rank, of the slowest wire"
    table = make_table(title, ("", *to), to)
    for one in machine.ranks:
        cells = ["" if one == other else f"{machine.bottleneck(one, other).gbps:g}" for other in to]
        table.add_row(one, *cells)
    return table


def rings_of(machine: Machine) -> list[str]:
    """Return the machine's best rings, a line each."""
    ring, gbps = best_ring(machine)
    lines = [f"widest ring, {gbps:g} GB/s: {' '.join(ring)}"]
    for ring, gbps in disjoint_rings(machine):
        lines.append(f"ring of its own wires, {gbps:g} GB/s: {' '.join(ring)}")
    return lines


def network_tree(network: Network) -> Tree:
    tree = Tree(f"[bold]{network.title}[/bold]", highlight=False)
    tree.add(f"a card: {network.gbps:g} GB/s each way\n[dim]{network.source}[/dim]")
    shape = "the i-th cards of all nodes" if network.rails else "all cards of a node"
    tree.add(f"one leaf for {shape}, {network.nodes_per_leaf} nodes")
    tree.add(
        f"{network.latency_us:g} us through a leaf, {network.spine_latency_us:g} us more over the "
        f"spine; {network.oversubscription:g}:1 above the leaves"
    )
    return tree
