# SPDX-License-Identifier: Apache-2.0
"""The options by which commands name a topology, and refusals in one place. Knows no command."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastcoll.cli.console import ExitCode, end_with
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.machine.cpu import affinity
from fastcoll_model.errors import ModelError
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.machines.described import describe
from fastcoll_model.machines.local import find
from fastcoll_model.machines.machine import (
    MACHINES,
    NETWORKS,
    Machine,
    load_machine,
    load_network,
    machine_of,
)

HERE = "here"
MACHINE_HELP = f"A machine's .json file, {HERE} (this one), or one of {', '.join(MACHINES)}."
NETWORK_HELP = f"Between nodes: a network's .json file, or one of {', '.join(NETWORKS)}."


def machine_named(name: str) -> Machine:
    """Return a machine that a command names.

    Raises:
        ModelError: There is no such machine or file, or the file contradicts itself.
    """
    return machine_of(describe(find(affinity())), HERE) if name == HERE else load_machine(name)


def cluster_for(machine: str, network: str | None, num_ranks: int | None) -> Cluster:
    """Return as many nodes as the ranks need; one full node if no number was given.

    Raises:
        UsageError: The ranks don't fill whole nodes, or nothing connects the nodes.
    """
    node = machine_named(machine)
    local_size = len(node.ranks)
    num_ranks = num_ranks or local_size
    num_nodes = -(-num_ranks // local_size)
    if num_nodes > 1 and num_ranks % local_size:
        raise UsageError(f"{num_ranks} ranks don't fill whole nodes of {local_size}")
    if num_nodes > 1 and network is None:
        raise UsageError(
            f"{num_ranks} ranks are {num_nodes} x {node.name}: name what connects them with "
            f"--network, one of {', '.join(NETWORKS)}"
        )
    return Cluster(node, num_nodes, load_network(network) if network else None)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn a refused request into a message and the exit code of a mistake."""
    try:
        yield
    except (UsageError, UnsupportedError, ModelError) as error:
        end_with(ExitCode.USAGE, str(error))
