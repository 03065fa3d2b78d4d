# SPDX-License-Identifier: Apache-2.0
"""ring: partial results travel from neighbour to neighbour, each chunk starting at another rank.

2 (n - 1) steps. The order of a sum depends on the chunk, hence on the size. So it runs only where
the order can't matter, or with `numerics="fast"`.
"""

from functools import partial

from fastcoll.choose.algorithms import shared
from fastcoll.choose.costs import Costs
from fastcoll.types import Algorithm, Request, Verb, order_matters

name = "ring"


def admits(request: Request) -> str | None:
    if reason := shared.not_plain(request) or shared.no_kernel(request, Algorithm.ring):
        return reason
    if request.numerics != "fast" and order_matters(request.dtype, request.op):
        return (
            f"ring changes the order of a {request.dtype.name} {request.op.name}, which "
            'numerics="same_bits" forbids; use chain for a ring in rank order, or numerics="fast"'
        )
    return None


def estimate_us(request: Request, calibrated: Costs | None = None) -> float:
    steps = request.world_size - 1
    if request.verb is Verb.all_reduce:
        steps *= 2
    step_bytes = request.staged_bytes / request.world_size
    # A step reads the neighbour's partial result and writes the next one.
    costs = shared.costs(request, calibrated)
    step_us = step_bytes * (2 * costs.copy_us_per_byte + costs.peer_us_per_byte)
    added_us = (request.world_size - 1) * step_bytes * costs.reduce_us_per_byte
    syncs_us = max(1, steps) * shared.sync_us(request, costs)
    return syncs_us + (max(1, steps) * step_us + added_us) * shared.share(request)


plan = partial(shared.make_plan, algorithm=Algorithm.ring)
