# SPDX-License-Identifier: Apache-2.0
"""Where each rank runs, as launchers are told: so that neighbours in rank are neighbours on wires.

Decides the order of a node's devices (its widest ring, where one can be found), and how torchrun
and Open MPI are told. Neither takes an order of GPUs: they are renumbered by CUDA_VISIBLE_DEVICES.
"""

import re
from collections.abc import Sequence
from typing import Literal

from fastcoll_model.errors import ModelError
from fastcoll_model.machines.machine import Machine
from fastcoll_model.placement import MAX_RANKS, best_ring

Launcher = Literal["torchrun", "openmpi"]


def device_order(machine: Machine) -> list[str]:
    """Return the node's devices so that the slowest hop from each to the next is the fastest.

    As they are, if no other order is better, or there are too many to try.
    """
    ranks = machine.ranks
    if not 2 < len(ranks) <= MAX_RANKS:
        return list(ranks)
    ring, gbps = best_ring(machine)
    hops = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    as_they_are = min(machine.bottleneck(one, other).gbps for one, other in hops)
    return ring if gbps > as_they_are else list(ranks)


def rank_file(machine: Machine, hosts: Sequence[str], launcher: Launcher) -> str:
    """Return a rank file, or shell lines, that place a rank on every device of every host.

    Args:
        machine: The model of a host; all hosts are alike.
        hosts: Their names, in the order of ranks.
        launcher: "openmpi" gives a file for `mpirun --map-by rankfile:file=FILE` (cores), or the
            lines of a shell (GPUs); "torchrun" a line of a shell for each host.

    Raises:
        ModelError: A host's name is no name, or stands twice; or the machine's devices have no
            numbers, or are of several kinds.
    """
    _check_hosts(hosts)
    kind, numbers = _numbers(device_order(machine))
    count, listed = len(numbers), ",".join(map(str, numbers))
    if launcher == "openmpi" and kind == "core":
        places = [(host, core) for host in hosts for core in numbers]
        return "".join(
            f"rank {rank}={host} slot={core}\n" for rank, (host, core) in enumerate(places)
        )
    if launcher == "openmpi":
        where = ",".join(f"{host}:{count}" for host in hosts)
        total = count * len(hosts)
        order = f"-x CUDA_VISIBLE_DEVICES={listed}"
        return f"mpirun -n {total} --host {where} --map-by slot {order} PROGRAM\n"
    pinned = f"CUDA_VISIBLE_DEVICES={listed}" if kind == "gpu" else f"taskset -c {listed}"
    return "".join(
        f"# on {host}\n{pinned} torchrun --nnodes {len(hosts)} --nproc-per-node {count} "
        f"--node-rank {node} --master-addr {hosts[0]} PROGRAM\n"
        for node, host in enumerate(hosts)
    )


def _check_hosts(hosts: Sequence[str]) -> None:
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", host):
            raise ModelError(f"{host!r} is no name of a host")
    if len(set(hosts)) < len(hosts) or not hosts:
        raise ModelError(f"hosts {', '.join(hosts) or 'none'}: name each of them once")


def _numbers(devices: Sequence[str]) -> tuple[str, list[int]]:
    """Return the kind of the devices, "gpu" or "core", and their numbers."""
    found = [re.fullmatch(r"(gpu|core)(\d+)", device) for device in devices]
    kinds = {match[1] if match else "" for match in found}
    if kinds not in ({"gpu"}, {"core"}):
        raise ModelError(
            f"devices {', '.join(devices[:3])}: a rank file needs gpu0, gpu1... or core0, core1..."
        )
    return kinds.pop(), [int(match[2]) for match in found if match]
