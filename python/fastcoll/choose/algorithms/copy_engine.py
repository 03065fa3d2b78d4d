# SPDX-License-Identifier: Apache-2.0
"""copy_engine: two_shot whose bytes are moved between GPUs by their copy engines, not by kernels.

Rank r fetches its part from all ranks and adds it in rank order. Then all ranks fetch the sums. Few
multiprocessors are kept busy; every step is started by the host. Only where it is asked for: no GPU
has run it yet, so it is not known where it is the fastest.
"""

from functools import partial

from fastcoll.choose.algorithms import shared, two_shot
from fastcoll.choose.costs import Costs
from fastcoll.types import Algorithm, Request, Verb, num_tensors

name = "copy_engine"

LEAST_BYTES = 4 << 20  # Not measured: below, some twenty launches take longer than the copies.
# Not measured: the extra cost of those launches over two_shot's one.
_LAUNCHES_US = 60.0


def admits(request: Request) -> str | None:
    if not request.on_gpu:
        return "copy_engine is for GPUs"
    if request.algorithm != name:
        return "only where it is asked for: it has not been measured"
    if request.verb is not Verb.all_reduce:
        return "copy_engine carries out all_reduce alone"
    if request.world_size == 1:
        return "copy_engine adds what several ranks have"
    if num_tensors(request.splits):
        return "copy_engine takes one tensor, not a list"
    if request.staged_bytes < LEAST_BYTES:
        return f"copy_engine is for {LEAST_BYTES} bytes and more, not {request.staged_bytes}"
    return shared.no_kernel(request, Algorithm.copy_engine)


def estimate_us(request: Request, calibrated: Costs | None = None) -> float:
    return _LAUNCHES_US + two_shot.estimate_us(request, calibrated)


plan = partial(shared.make_plan, algorithm=Algorithm.copy_engine)
