# SPDX-License-Identifier: Apache-2.0
"""one_shot: every rank reads the inputs of all ranks and reduces all of them, in rank order.

One synchronisation; (n + 3) S bytes per rank. For small messages; the smallest travel in the
flag lines.
"""

from functools import partial

from fastcoll.choose.algorithms import shared, two_shot
from fastcoll.choose.costs import Costs
from fastcoll.types import Algorithm, Request, Verb

name = "one_shot"


def admits(request: Request) -> str | None:
    return shared.not_a_reduction(request) or shared.no_kernel(request, Algorithm.one_shot)


def estimate_us(request: Request, calibrated: Costs | None = None) -> float:
    if request.verb is Verb.reduce_scatter:
        # It has but one shot: csrc runs it as two_shot without its second.
        return two_shot.estimate_us(request, calibrated)
    size, peers = request.staged_bytes, request.world_size - 1
    costs, share = shared.costs(request, calibrated), shared.share(request)
    giving_us = size * costs.copy_us_per_byte
    reading_us = size * peers * (costs.peer_us_per_byte + costs.reduce_us_per_byte)
    # A reduce: the root alone reads, while the others stage the next segment.
    if request.verb is not Verb.reduce:
        moving_us = (giving_us + reading_us) * share
    else:  # all the CPUs' work, or the root's. Fits 2 to 4 ranks on 2 CPUs of a Zen 4 and a Xeon.
        all_us = (giving_us * peers + reading_us) * share / request.world_size
        moving_us = max(reading_us, all_us)
    return shared.sync_us(request, costs) + moving_us


plan = partial(shared.make_plan, algorithm=Algorithm.one_shot, may_be_inline=True)
