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
    if request.verb is not Verb.reduce:
        moving_us = (giving_us + reading_us) * share
    elif share == 1:  # the root alone reads, while the others stage the next segment
        moving_us = reading_us
        if not request.on_gpu:
            # The root has its own input and the result to move, too. Measured, 2 ranks: a Xeon's is
            # slower than two_shot from a segment on, an AMD CPU's from more than one on.
            free = shared.SEGMENT_BYTES // (1 if shared.is_amd(request) else 4)
            moving_us += max(0, size - free) * costs.copy_us_per_byte
    else:  # the others' work on the CPUs that there are; the root's is one CPU's alone
        moving_us = giving_us * peers * share / request.world_size + reading_us
    return shared.sync_us(request, costs) + moving_us


plan = partial(shared.make_plan, algorithm=Algorithm.one_shot, may_be_inline=True)
