# SPDX-License-Identifier: Apache-2.0
"""direct: readers copy from where the owner's data lies; for all verbs that only move data."""

from fastcoll.algorithms import shared
from fastcoll.costs import Costs
from fastcoll.plan import Plan
from fastcoll.types import REDUCTIONS, Algorithm, Request

name = "direct"


def admits(request: Request) -> str | None:
    """Return None if direct can run the request, else the reason."""
    if request.verb in REDUCTIONS:
        return f"direct only moves data; {request.verb.name} reduces"
    return shared.no_kernel(request, Algorithm.direct)


def estimate_us(request: Request, calibrated: Costs | None = None) -> float:
    """Return the modelled time of one call; see `shared.costs`."""
    size = request.staged_bytes
    costs = shared.costs(request, calibrated)
    moving_us = size * (costs.copy_us_per_byte + (request.world_size - 1) * costs.peer_us_per_byte)
    return shared.sync_us(request, costs) + moving_us * shared.share(request)


def plan(request: Request) -> Plan:
    """Return the plan that runs the request."""
    return shared.make_plan(
        request, Algorithm.direct, inline=shared.fits_inline(request, Algorithm.direct)
    )
