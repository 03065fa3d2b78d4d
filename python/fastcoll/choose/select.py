# SPDX-License-Identifier: Apache-2.0
"""Choose the algorithm of one call.

Decides which candidate runs a request: the requested one, or the fastest that the tuning table
knows, or the cheapest by the model. The model's choice stands where the table can't tell the
fastest from it: the difference may be the noise of one measurement. Pure: no process group, no
device, no environment, no private or symmetric memory. So every rank comes to the same plan.

Sizes are rounded up to one of four steps to a doubling, and one choice covers all sizes of a step.
It also covers every cut of a message into the tensors of a list or into uneven parts. So a program
with ever new sizes finds plans that C++ knows. This does not hold on GPUs, nor where an algorithm
admits some of these sizes only. The choice depends on the size alone, never on the sizes a rank has
had before. Otherwise ranks would come to different plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fastcoll.choose.costs import Costs
from fastcoll.choose.plan import Plan
from fastcoll.choose.table import Measured, TuningTable
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.types import REDUCTIONS, SCHEDULE_PREFIX, Algorithm, Request, Verb

_SIZES_LOG2 = 2  # how many sizes to a doubling are planned, in bits


class Candidate(Protocol):
    """An algorithm module, as the selection sees it."""

    @property
    def name(self) -> str:
        """The algorithm's name."""

    def admits(self, request: Request, /) -> str | None:
        """Return None if it can run the request, else the reason."""

    def estimate_us(self, request: Request, calibrated: Costs | None = None, /) -> float:
        """Return the modelled time of one call, with the model's own constants or others."""

    def plan(self, request: Request, /) -> Plan:
        """Return the plan that runs the request."""


@dataclass(frozen=True)
class Choice:
    """A plan, and the reasons for it."""

    plan: Plan
    # For each candidate the reason for or against it, with times of the largest of `numels`.
    reasons: dict[str, str]
    # The least and the largest numel of this choice. Their plans differ from this one in nothing
    # else. Nor do the plans of messages with another cut into list or parts.
    numels: tuple[int, int]


def select(
    request: Request, candidates: Sequence[Candidate], table: TuningTable | None = None
) -> Choice:
    """Choose the plan of `request`: by the table first, by the model second.

    Args:
        request: The request.
        candidates: The algorithms.
        table: The measurements of this machine; the same on every rank of the group. Without it,
            and for candidates that it does not know, times are the model's.

    Raises:
        UsageError: `request.algorithm` is not a name of an algorithm.
        UnsupportedError: The algorithm asked for does not admit the request.
    """
    numels, asked = _planned_alike(request, candidates), request
    request = replace(request, numel=numels[1])
    reasons: dict[str, str] = {}
    known: dict[str, Measured] = {}
    admitted: dict[str, Candidate] = {}
    costs_us: dict[str, float] = {}
    calibrated = table.costs if table else None
    for candidate in candidates:
        reason = candidate.admits(request)
        if reason is None:
            admitted[candidate.name] = candidate
            measured = table.measured(request, candidate.name) if table else None
            if measured:
                known[candidate.name] = measured
            cost_us = measured.time_us if measured else candidate.estimate_us(request, calibrated)
            costs_us[candidate.name] = cost_us
            reason = f"{cost_us:.2f} us" + (" (measured)" if measured else "")
        reasons[candidate.name] = reason
    if request.algorithm != "auto":
        best = _requested(request, candidates, reasons)
    elif not admitted:
        raise UnsupportedError(f"no algorithm runs {asked}: {reasons}")
    else:
        name = min(known or costs_us, key=costs_us.__getitem__)
        if known:
            usual = min(admitted.values(), key=lambda one: one.estimate_us(request)).name
            if usual != name and usual in known and known[usual].low_us <= known[name].high_us:
                reasons[usual] += f"; no difference to {name}, so the model's choice stands"
                name = usual
        best = admitted[name]
    plan = replace(_plan(request, best, known.get(best.name)), numel=asked.numel)
    return Choice(plan, reasons, numels)


def _planned_alike(request: Request, candidates: Sequence[Candidate]) -> tuple[int, int]:
    """Return the least and the largest of the sizes with one choice, which is the largest's.

    Powers of two are the largest of their sizes. On GPUs each size has its own choice, as packs end
    at sizes of their own.
    """
    numel = request.numel
    if request.on_gpu:
        return numel, numel
    shift = max(0, (numel - 1).bit_length() - 1 - _SIZES_LOG2)
    most = -(-numel >> shift) << shift
    least = most - (1 << shift) + 1
    ends = [replace(request, numel=end) for end in (least, most)]
    for candidate in candidates:
        small, large = (candidate.admits(end) is None for end in ends)
        if small != large:
            return numel, numel
    return least, most


def _plan(request: Request, candidate: Candidate, measured: Measured | None) -> Plan:
    plan = candidate.plan(request)
    return plan if measured is None else replace(plan, segment_bytes=measured.segment_bytes)


def _requested(
    request: Request, candidates: Sequence[Candidate], reasons: dict[str, str]
) -> Candidate:
    for candidate in candidates:
        if candidate.name != request.algorithm:
            continue
        if candidate.admits(request) is not None:
            raise UnsupportedError(
                f'{request.verb.name}(algorithm="{candidate.name}"): {reasons[candidate.name]}'
            )
        return candidate
    raise _unknown(request.algorithm, request.verb, [one.name for one in candidates])


def check_name(algorithm: object, verb: Verb) -> None:
    """Raise UsageError unless a call's `algorithm` is a name that some group knows."""
    if not isinstance(algorithm, str):
        raise UsageError(f"algorithm must be a name, not {algorithm!r}")
    known = [one.name for one in Algorithm if one is not Algorithm.schedule]
    if not (algorithm in ("auto", *known) or algorithm.startswith(SCHEDULE_PREFIX)):
        raise _unknown(algorithm, verb, known)


def _unknown(algorithm: str, verb: Verb, known: Sequence[str]) -> UsageError:
    names = ["auto", f"{SCHEDULE_PREFIX}NAME", *known]
    if verb in REDUCTIONS:
        names.remove("direct")
    return UsageError(f'there is no algorithm "{algorithm}"; the algorithms are {", ".join(names)}')
