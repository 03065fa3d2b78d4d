# SPDX-License-Identifier: Apache-2.0
"""chain: partial results travel from rank 0 to rank n - 1, the result travels back.

A ring's links with the bits of rank order; 2 (n - 1) steps over the whole message.
"""

from functools import partial

from fastcoll.choose.algorithms import shared
from fastcoll.choose.costs import Costs
from fastcoll.types import Algorithm, Request

name = "chain"


def admits(request: Request) -> str | None:
    return shared.not_plain(request) or shared.no_kernel(request, Algorithm.chain)


def estimate_us(request: Request, calibrated: Costs | None = None) -> float:
    steps = max(1, 2 * (request.world_size - 1))
    # Pipelined: every rank moves the whole message there and back, once.
    costs = shared.costs(request, calibrated)
    per_byte = 2 * (costs.copy_us_per_byte + costs.peer_us_per_byte) + costs.reduce_us_per_byte
    moving_us = request.staged_bytes * per_byte
    return steps * shared.sync_us(request, costs) + moving_us * shared.share(request)


plan = partial(shared.make_plan, algorithm=Algorithm.chain)
