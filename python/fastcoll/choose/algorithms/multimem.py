# SPDX-License-Identifier: Apache-2.0
"""multimem: the switch between the GPUs reduces, and stores for all (NVLink SHARP).

Two synchronisations; (1 + 1/n) S bytes per rank and direction for any number of ranks. The switch
reduces in an order of its own, and rounds before an AVG divides. So sums of floats need
`numerics="fast"`; integers have the same bits in any order. It takes integers one by one, whose
price has not been measured. Its MIN and MAX of floats promise neither NaN nor -0 < +0.

A broadcast or an all_gather by it is pushed: a message leaves its rank once, for all ranks.
"""

from functools import partial

from fastcoll.choose.algorithms import shared
from fastcoll.choose.costs import Costs
from fastcoll.types import FLOAT_DTYPES, ITEMSIZE, Algorithm, Op, Request, Verb, order_matters

name = "multimem"

_PUSHED = (Verb.all_gather, Verb.broadcast)


def admits(request: Request) -> str | None:
    if not request.on_gpu:
        return "multimem is for GPUs"
    pushes = request.verb in _PUSHED
    if pushes and request.splits:
        return "the switch pushes parts of one size"
    reason = None if pushes else shared.not_plain(request) or _unfit(request)
    if reason := reason or shared.no_kernel(request, Algorithm.multimem):
        return reason
    if request.no_multicast:
        return f"the GPUs' switch can't be used here: {request.no_multicast}"
    if pushes or request.numerics == "fast" or not order_matters(request.dtype, request.op):
        return None
    return (
        'the switch adds in an order of its own, which numerics="same_bits" forbids; use '
        'two_shot, or numerics="fast"'
    )


def _unfit(request: Request) -> str | None:
    """Return why the switch lacks an operation, else None."""
    if request.op is Op.PRODUCT:
        return "the switch does not multiply"
    if request.op in (Op.MIN, Op.MAX) and request.dtype in FLOAT_DTYPES:
        return f"the switch's {request.op.name} of floats does not keep NaN and -0 < +0"
    return None


def estimate_us(request: Request, calibrated: Costs | None = None) -> float:
    costs = shared.costs(request, calibrated)
    if request.verb in _PUSHED:
        parts = request.world_size if request.verb is Verb.all_gather else 1
        arriving = request.numel * ITEMSIZE[request.dtype] * parts
        per_byte = costs.peer_us_per_byte + costs.copy_us_per_byte  # into scratch, and out of it
        return 2 * shared.sync_us(request, costs) + arriving * per_byte
    gathers = request.verb is Verb.all_reduce
    # The switch reads a rank's memory, and in an all_reduce gets a part from it to store.
    crossing = request.staged_bytes * (1 + (1 / request.world_size if gathers else 0))
    moving_us = request.staged_bytes * costs.copy_us_per_byte + crossing * costs.peer_us_per_byte
    return (2 if gathers else 1) * shared.sync_us(request, costs) + moving_us


plan = partial(shared.make_plan, algorithm=Algorithm.multimem)
