# SPDX-License-Identifier: Apache-2.0
"""Choose the algorithm of one call.

Decides which candidate runs a request: the one that was asked for, or the cheapest that admits
it. Pure: no process group, no device, no environment, no private or symmetric memory, so that
every rank comes to the same plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.plan import Plan
from fastcoll.types import REDUCTIONS, Request


class Candidate(Protocol):
    """What an algorithm module offers."""

    @property
    def name(self) -> str:
        """The algorithm's name."""

    def admits(self, request: Request, /) -> str | None:
        """Return None if it can run the request, else the reason."""

    def estimate_us(self, request: Request, /) -> float:
        """Return the modelled time of one call."""

    def plan(self, request: Request, /) -> Plan:
        """Return the plan that runs the request."""


@dataclass(frozen=True)
class Choice:
    """A plan, and for each candidate a line that says what spoke for or against it."""

    plan: Plan
    reasons: dict[str, str]


def select(request: Request, candidates: Sequence[Candidate]) -> Choice:
    """Choose the plan of `request`.

    Raises:
        UsageError: `request.algorithm` is not a name of an algorithm.
        UnsupportedError: The algorithm asked for does not admit the request.
    """
    reasons: dict[str, str] = {}
    admitted: list[tuple[float, Candidate]] = []
    for candidate in candidates:
        reason = candidate.admits(request)
        if reason is None:
            cost_us = candidate.estimate_us(request)
            admitted.append((cost_us, candidate))
            reason = f"{cost_us:.2f} us"
        reasons[candidate.name] = reason
    if request.algorithm != "auto":
        return _requested(request, candidates, reasons)
    if not admitted:
        raise UnsupportedError(f"no algorithm runs {request}: {reasons}")
    _, best = min(admitted, key=lambda pair: pair[0])
    return Choice(best.plan(request), reasons)


def _requested(
    request: Request, candidates: Sequence[Candidate], reasons: dict[str, str]
) -> Choice:
    for candidate in candidates:
        if candidate.name != request.algorithm:
            continue
        if candidate.admits(request) is not None:
            raise UnsupportedError(
                f'{request.verb.name}(algorithm="{candidate.name}"): {reasons[candidate.name]}'
            )
        return Choice(candidate.plan(request), reasons)
    names = ["auto", *(c.name for c in candidates)]
    if request.verb in REDUCTIONS:
        names.remove("direct")
    raise UsageError(
        f'there is no algorithm "{request.algorithm}"; the algorithms are {", ".join(names)}'
    )
