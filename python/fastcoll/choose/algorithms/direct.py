# SPDX-License-Identifier: Apache-2.0
"""direct: readers copy from where the owner's data lies; for all verbs that only move data."""

from functools import partial

from fastcoll.choose.algorithms import moving, shared, single_copy
from fastcoll.choose.costs import Costs
from fastcoll.types import REDUCTIONS, Algorithm, Request

name = "direct"


def admits(request: Request) -> str | None:
    if request.verb in REDUCTIONS:
        return f"direct only moves data; {request.verb.name} reduces"
    if request.single_copy == "always" and single_copy.admits(request) is None:
        return "FASTCOLL_SINGLE_COPY=always takes single_copy"
    return shared.no_kernel(request, Algorithm.direct)


def estimate_us(request: Request, calibrated: Costs | None = None) -> float:
    return moving.staged_us(request, calibrated)


plan = partial(shared.make_plan, algorithm=Algorithm.direct, may_be_inline=True)
