# SPDX-License-Identifier: Apache-2.0
"""two_shot: rank r reduces chunk r in rank order, then all ranks take the reduced chunks.

Two synchronisations, pipelined by segments; (5 - 2/n) S bytes per rank. For large messages.
"""

from dataclasses import replace
from functools import partial

from fastcoll.choose.algorithms import shared
from fastcoll.choose.costs import Costs
from fastcoll.types import Algorithm, Request, Verb

name = "two_shot"

# A rank that waits in the middle of a call waits for a CPU this many times as long as at its start.
# Measured: one_shot and two_shot tie between 128 and 512 KiB for 4 ranks on 2 CPUs.
_RESUMED = 1.5


def admits(request: Request) -> str | None:
    return shared.not_a_reduction(request) or shared.no_kernel(request, Algorithm.two_shot)


def estimate_us(request: Request, calibrated: Costs | None = None) -> float:
    others = request.staged_bytes * (request.world_size - 1) / request.world_size
    shots = 1 if request.verb is Verb.reduce_scatter else 2
    costs = shared.costs(request, calibrated)
    gets = float(shots)
    is_shared_reduce = request.verb is Verb.reduce and shared.share(request) > 1
    is_amd = shared.is_amd(request) and not request.on_gpu
    if is_shared_reduce:
        gets = 1 + 1 / request.world_size  # the root alone takes the others' chunks
        if is_amd and request.staged_bytes > shared.CACHED_BYTES:
            gets += 1  # all chunks come from memory: fits 16 MiB on a Zen 4 and a Zen 5
    moving_us = others * (
        costs.copy_us_per_byte + gets * costs.peer_us_per_byte + costs.reduce_us_per_byte
    )
    syncing_us = shared.sync_us(request, costs)
    if shots == 2 and request.on_gpu:
        syncing_us *= 2
    elif shots == 2:
        # Nothing overlaps in the one segment of a small message: fits 32 to 128 KiB, 2 ranks.
        syncing_us += 2 * costs.flag_us
        # In a reduce the root alone waits again: fits 8 to 512 KiB, 4 ranks on 2 CPUs of a Xeon.
        resumed = 0.0 if is_shared_reduce and not is_amd else _RESUMED
        syncing_us += shared.sync_us(request, replace(costs, switch_us=resumed * costs.switch_us))
    if is_shared_reduce and is_amd:
        # Fits 128 and 512 KiB, 4 ranks on 2 CPUs of a Zen 3 and a Zen 4; not so on a Xeon.
        syncing_us += (request.world_size - 1) * costs.switch_us
    return syncing_us + moving_us * shared.share(request)


plan = partial(shared.make_plan, algorithm=Algorithm.two_shot)
