# SPDX-License-Identifier: Apache-2.0
"""The connection to the other ranks by which a group sets up its GPUs.

Decides how steps that may fail on any rank become one verdict. Must not know the steps.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fastcoll.errors import FastcollError

Facts = dict[str, Any]


class Link(Protocol):
    """How this rank reaches the others."""

    rank: int
    socket_fds: list[int]

    def gather(self, facts: Facts) -> list[Facts]:
        """Give `facts` and return those of all ranks, by rank. Collective."""

    def exchange_fds(self, fd: int) -> list[int]:
        """Give a descriptor and return those of all ranks, by rank. Collective."""


def try_together(link: Link, step: Callable[[], object], problem: str = "") -> str:
    """Take a step, unless there is a problem already; return all ranks' problems. Collective.

    Returns:
        Which ranks failed and why, the same on all; empty if all went well.
    """
    return problems(link.gather({"problem": problem or problem_of(step)}))


def problem_of(step: Callable[[], object]) -> str:
    """Take a step of this rank and return why it failed; empty if it did not."""
    try:
        step()
    except (FastcollError, OSError) as error:
        return str(error)
    return ""


def problems(rows: Sequence[Facts]) -> str:
    """Return the ranks with a problem, and its text; empty if no rank has one."""
    return "; ".join(f"rank {rank}: {r['problem']}" for rank, r in enumerate(rows) if r["problem"])
