# SPDX-License-Identifier: Apache-2.0
"""Machines of several sockets: which ranks share one, and machines made up for a plan.

Decides what parts two sockets: a wire between sockets, or between the memories of two NUMA nodes.
"""

from typing import Any, Literal

from fastcoll_model.machines.machine import Machine, load_machine, machine_of

_APART = ("socket to socket", "node to node")


def sockets_of(machine: Machine) -> list[int]:
    """Return the socket of each rank; they are numbered as ranks come upon them."""
    found: dict[str, int] = {}
    sockets = []
    for rank in machine.ranks:
        if rank not in found:
            found.update(dict.fromkeys(_reached(machine, rank), len(set(found.values()))))
        sockets.append(found[rank])
    return sockets


def _reached(machine: Machine, device: str) -> set[str]:
    """Return the devices that are reached without a wire between sockets."""
    seen, todo = {device}, [device]
    while todo:
        here = todo.pop()
        for there in machine.neighbours.get(here, []):
            if there not in seen and machine.wires[here, there].kind not in _APART:
                seen.add(there)
                todo.append(there)
    return seen


def made_up(
    num_sockets: int, num_cores: int, ranks: Literal["filled", "dealt"] = "filled"
) -> Machine:
    """Return a machine that nobody has measured: sockets of `num_cores`, all pairs wired.

    Rates are those of the catalogue's cpu-2s: measured within a socket, assumed between two.

    Args:
        num_sockets: Sockets.
        num_cores: Cores on each, with a rank on each core.
        ranks: "filled": a socket's cores have consecutive ranks. "dealt": rank i is on socket i
            modulo `num_sockets`.
    """
    like = load_machine("cpu-2s")
    inside, between = like.wires["core0", "socket0"], like.wires["socket0", "socket1"]
    sockets, num_ranks = range(num_sockets), num_sockets * num_cores
    filled = [f"core{core}" for core in range(num_ranks)]
    dealt = [filled[socket * num_cores + i] for i in range(num_cores) for socket in sockets]
    cores = [(filled[i], f"socket{i // num_cores}") for i in range(num_ranks)]
    pairs = [(f"socket{i}", f"socket{j}") for i in sockets for j in range(i)]
    links: list[dict[str, Any]] = [
        {"between": [list(pair) for pair in pairs_], **vars(wire)}
        for pairs_, wire in ((cores, inside), (pairs, between))
        if pairs_
    ]
    document = {
        "format": 1,
        "kind": "machine",
        "name": f"{num_sockets}x{num_cores}",
        "title": f"made up: {num_sockets} sockets of {num_cores} cores",
        "ranks": filled if ranks == "filled" else dealt,
        "links": links,
        "reduce_gbps": like.reduce_gbps,
        "copy_gbps": like.copy_gbps,
        "memory_gb": like.memory_gb,
        "source": "rates as in cpu-2s",
    }
    return machine_of(document, "a machine made up")
