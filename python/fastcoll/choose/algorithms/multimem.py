# SPDX-License-Identifier: Apache-2.0
"""multimem: the switch between the GPUs reduces, and stores the results (NVLink SHARP).

Two synchronisations; (1 + 1/n) S bytes per rank and direction for any number of ranks. The switch
reduces in an order of its own, and rounds before an AVG divides. So sums of floats need
`numerics="fast"`; integers have the same bits in any order. It takes integers one by one, whose
price has not been measured. Its MIN and MAX of floats promise neither NaN nor -0 < +0.
"""

from functools import partial

from fastcoll.choose.algorithms import shared
from fastcoll.choose.costs import Costs
from fastcoll.types import FLOAT_DTYPES, Algorithm, Op, Request, Verb, order_matters

name = "multimem"


def admits(request: Request) -> str | None:
    """Return None if multimem can run the request, else the reason."""
    if not request.on_gpu:
        return "multimem is for GPUs"
    if reason := shared.not_plain(request):
        return reason
    if request.op is Op.PRODUCT:
        return "the switch does not multiply"
    if request.op in (Op.MIN, Op.MAX) and request.dtype in FLOAT_DTYPES:
        return f"the switch's {request.op.name} of floats does not keep NaN and -0 < +0"
    if reason := shared.no_kernel(request, Algorithm.multimem):
        return reason
    if request.no_multicast:
        return f"the GPUs' switch can't add here: {request.no_multicast}"
    if request.numerics != "fast" and order_matters(request.dtype, request.op):
        return (
            'the switch adds in an order of its own, which numerics="same_bits" forbids; use '
            'two_shot, or numerics="fast"'
        )
    return None


def estimate_us(request: Request, calibrated: Costs | None = None) -> float:
    """Return the modelled time of one call; see `shared.costs`."""
    gathers = request.verb is Verb.all_reduce
    costs = shared.costs(request, calibrated)
    # The switch reads a rank's memory, and in an all_reduce gets a part from it to store.
    crossing = request.staged_bytes * (1 + (1 / request.world_size if gathers else 0))
    moving_us = request.staged_bytes * costs.copy_us_per_byte + crossing * costs.peer_us_per_byte
    return (2 if gathers else 1) * shared.sync_us(request, costs) + moving_us


plan = partial(shared.make_plan, algorithm=Algorithm.multimem)
