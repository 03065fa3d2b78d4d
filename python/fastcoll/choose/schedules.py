# SPDX-License-Identifier: Apache-2.0
"""Calls by a schedule of the model: `algorithm="schedule:tree"`.

Decides which schedules may carry out a request. fastcoll_model builds their steps, and
csrc/cpu/executor.h runs them.
"""

from dataclasses import replace

from fastcoll.choose.algorithms import shared
from fastcoll.choose.plan import Plan
from fastcoll.errors import UnsupportedError, UsageError
from fastcoll.types import (
    REDUCTIONS,
    SCHEDULE_PREFIX,
    Algorithm,
    Request,
    Verb,
    accumulator,
    order_matters,
)
from fastcoll_model.builders import check_algorithm
from fastcoll_model.compiled import Compiled, compiled
from fastcoll_model.errors import ModelError, NotRunnableError


def check_name(algorithm: str, verb: Verb) -> None:
    """Raise UsageError if there is no schedule by the name in `algorithm`; a barrier has none."""
    if verb is Verb.barrier:
        return
    try:
        check_algorithm(verb.name, algorithm.removeprefix(SCHEDULE_PREFIX))
    except ModelError as error:
        raise UsageError(str(error)) from None


def plan_of(request: Request) -> tuple[Plan, Compiled]:
    """Return the plan that carries out a request by the schedule it names, and the schedule.

    Raises:
        UsageError: There is no such schedule.
        UnsupportedError: It can't carry out this request.
    """
    check_name(request.algorithm, request.verb)
    name = request.algorithm.removeprefix(SCHEDULE_PREFIX)
    if request.verb is Verb.barrier or request.on_gpu or request.splits:
        raise UnsupportedError(
            f"{request.algorithm}: schedules move tensors on CPUs, in parts of one size"
        )
    found = _compile(request, name)
    if request.verb in REDUCTIONS and request.numerics != "fast":
        _check_bits(request, found)
    plan = shared.make_plan(request, Algorithm.schedule)
    return replace(plan, splits=found.digest), found


def _compile(request: Request, name: str) -> Compiled:
    try:
        return compiled(request.verb.name, name, request.world_size, request.root)
    except NotRunnableError as error:
        raise UnsupportedError(str(error)) from None
    except ModelError as error:
        raise UsageError(str(error)) from None


def _check_bits(request: Request, found: Compiled) -> None:
    if order_matters(request.dtype, request.op):
        if not found.proof.rank_order:
            raise UnsupportedError(
                f"{request.algorithm} does not add in rank order, as "
                'numerics="same_bits" asks for; use numerics="fast"'
            )
        if accumulator(request.dtype) is not request.dtype:
            raise UnsupportedError(
                f"{request.algorithm} rounds {request.dtype.name} at every addition, which "
                'numerics="same_bits" forbids; use numerics="fast"'
            )
