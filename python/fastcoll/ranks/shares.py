# SPDX-License-Identifier: Apache-2.0
"""Which CPUs each rank of this machine gets, and how many threads fill them.

Decides the shares: whole cores where there are enough, neighbours together. Knows no process.
"""

from dataclasses import dataclass
from itertools import pairwise

from fastcoll.machine.cpu import affinity, cores, cpu_quota


@dataclass(frozen=True)
class Share:
    """One rank's part of the machine."""

    cpus: tuple[int, ...]  # the CPUs that it may run on; empty: those of its parent
    num_threads: int  # threads that its computation may use


def share_cpus(num_ranks: int) -> list[Share]:
    """Return each rank's share of the CPUs that this process may use.

    Ranks that outnumber the CPUs, or a container's quota of them, share all.
    """
    allowed, quota = affinity(), cpu_quota()
    units = cores(allowed)
    if len(units) < num_ranks:
        units = [(cpu,) for core in units for cpu in core]
    if min(len(units), quota) < num_ranks:
        return [Share((), 1)] * num_ranks
    ends = [len(units) * rank // num_ranks for rank in range(num_ranks + 1)]
    busy = min(1.0, quota / len(allowed))  # the part of all CPUs that may be kept busy
    parts = [units[begin:end] for begin, end in pairwise(ends)]
    return [
        Share(tuple(sorted(cpu for unit in part for cpu in unit)), max(1, int(len(part) * busy)))
        for part in parts
    ]
