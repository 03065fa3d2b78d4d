# SPDX-License-Identifier: Apache-2.0
"""What the algorithms share: the constants of the cost model, and how a plan is built.

Decides the alpha-beta constants and the segment size. Must not know which algorithm wins.
"""

from fastcoll import _C
from fastcoll.plan import Plan
from fastcoll.types import COUNTED, REDUCTIONS, Algorithm, Request, Verb

# measured: one-way flags, copies and reads of a peer's lines between 2 cores of one Xeon with
# AVX-512; best windows.
FLAG_US = 0.16
COPY_US_PER_BYTE = 1 / 50e3  # 50 GB/s: copy within a core's own cache
PEER_US_PER_BYTE = 1 / 20e3  # 20 GB/s: read lines that another core wrote
# With more ranks than CPUs a synchronisation waits for other ranks to be scheduled. Set so that
# one_shot and two_shot cross near 96 KiB for 4 ranks on 2 CPUs, where they tie when measured.
SWITCH_US = 7.5

# measured: with a CPU for each rank 128 KiB is best from 2 to 32 MiB, and within 8 % of the best
# from 32 KiB to 1 MiB; with 4 ranks on 2 CPUs, whose slots share the caches, 64 KiB is 5 % better.
SEGMENT_BYTES = 128 << 10
SHARED_SEGMENT_BYTES = 64 << 10


def sync_us(request: Request) -> float:
    """Return the time of one synchronisation of all ranks."""
    waiting = max(0, request.world_size - request.num_cpus)
    return FLAG_US * max(1, request.world_size - 1) + SWITCH_US * waiting


def share(request: Request) -> float:
    """Return how many ranks share one CPU: what moves bytes takes that much longer."""
    return max(1.0, request.world_size / max(1, request.num_cpus))


def fits_inline(request: Request) -> bool:
    """Return whether the message can travel in the flag lines."""
    return request.splits != COUNTED and request.staged_bytes <= _C.K_INLINE_MAX_BYTES


def make_plan(request: Request, algorithm: Algorithm, *, inline: bool = False) -> Plan:
    """Return the plan that runs `request` by `algorithm`."""
    return Plan(
        verb=request.verb,
        dtype=request.dtype,
        op=request.op,
        algorithm=algorithm,
        numel=request.numel,
        root=request.root,
        segment_bytes=SEGMENT_BYTES if share(request) == 1 else SHARED_SEGMENT_BYTES,
        fast_numerics=request.numerics == "fast",
        inline=inline,
        splits=request.splits,
    )


def not_a_reduction(request: Request) -> str | None:
    """Return why a reducing algorithm can't run a verb that only moves data, else None."""
    if request.verb in REDUCTIONS:
        return None
    return f"{request.verb.name} moves data and has one algorithm, direct"


def not_a_chain(request: Request) -> str | None:
    """Return why an algorithm that passes partial results on can't run a verb, else None."""
    if request.verb is Verb.reduce:
        return "reduce has the algorithms one_shot and two_shot"
    return not_a_reduction(request)
