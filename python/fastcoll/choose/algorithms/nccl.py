# SPDX-License-Identifier: Apache-2.0
"""nccl: NCCL carries calls that kernels can't, or calls for which it was measured to be faster.

It adds by itself where the order of the ranks may be its own. Else it moves the bytes, and every
rank adds its part in rank order: the same bits as by every other algorithm.
"""

from functools import partial

from fastcoll.choose.algorithms import moving, one_shot, shared, two_shot
from fastcoll.choose.costs import Costs
from fastcoll.types import REDUCTIONS, Algorithm, Request, Verb

name = "nccl"

# Not measured: a call of NCCL's on NVLink (published: 8 to 17 us), after the ranks have met on
# their CPUs. Its bytes are staged as by our kernels, so that only a table can prefer it to them.
_CALL_US = 20.0


def admits(request: Request) -> str | None:
    if not request.on_gpu:
        return "nccl is for GPUs"
    if request.no_nccl:
        return f"NCCL can't be used here: {request.no_nccl}"
    return None


def estimate_us(request: Request, calibrated: Costs | None = None) -> float:
    if request.verb is Verb.reduce:
        return _CALL_US + one_shot.estimate_us(request, calibrated)
    if request.verb in REDUCTIONS:
        return _CALL_US + two_shot.estimate_us(request, calibrated)
    return _CALL_US + moving.staged_us(request, calibrated)


plan = partial(shared.make_plan, algorithm=Algorithm.nccl)
