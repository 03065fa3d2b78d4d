# SPDX-License-Identifier: Apache-2.0
"""single_copy: the receiver of a message copies it out of its owner's private memory.

For large messages of verbs that only move data, between ranks that the kernel lets read each
other's memory.
"""

from functools import partial

from fastcoll.choose.algorithms import moving, shared
from fastcoll.choose.costs import Costs
from fastcoll.types import COUNTED, ITEMSIZE, REDUCTIONS, Algorithm, Request, Verb, num_tensors

name = "single_copy"

LEAST_BYTES = 64 << 10  # kLeastInPlaceBytes in csrc/cpu/direct.h: less is staged anyway


def admits(request: Request) -> str | None:
    if request.on_gpu:
        return "single_copy is for CPUs"
    if request.verb in REDUCTIONS or request.verb is Verb.barrier:
        return f"single_copy moves data; {request.verb.name} does not only"
    if request.world_size == 1:
        return "there is no other rank"
    if request.single_copy == "never":
        return "FASTCOLL_SINGLE_COPY=never, or a rank can't read another one's memory"
    if num_tensors(request.splits):
        return "the tensors of a list lie in many places"
    num_bytes = request.numel * ITEMSIZE[request.dtype]
    if num_bytes < LEAST_BYTES and request.splits != COUNTED:
        return f"messages of less than {LEAST_BYTES} bytes are staged"
    return None


def estimate_us(request: Request, calibrated: Costs | None = None) -> float:
    return moving.read_us(request, calibrated)


plan = partial(shared.make_plan, algorithm=Algorithm.single_copy)
