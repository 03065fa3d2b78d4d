# SPDX-License-Identifier: Apache-2.0
"""The common parts of the algorithms: the constants of the cost model, and how a plan is built.

Decides the alpha-beta constants and the segment size. Must not know which algorithm wins.
"""

from fastcoll.choose.costs import Costs
from fastcoll.choose.plan import Plan
from fastcoll.machine import gpu
from fastcoll.types import COUNTED, ITEMSIZE, REDUCTIONS, Algorithm, Request, Verb, num_tensors

# measured: one-way flags, copies and reads of a peer's cache lines between 2 cores of one Xeon with
# AVX-512; best windows. A copy within a core's own cache has 50 GB/s. A read of cache lines that
# another core wrote has 20 GB/s.
# With more ranks than CPUs a synchronisation waits for other ranks to be scheduled: fits where
# algorithms cross for 4 ranks on 2 CPUs.
CPU = Costs(flag_us=0.16, copy_us_per_byte=1 / 50e3, peer_us_per_byte=1 / 20e3, switch_us=7.5)
# The same of AMD's: fits where algorithms cross on a Zen 3 and a Zen 4.
AMD = Costs(flag_us=0.1, copy_us_per_byte=1 / 50e3, peer_us_per_byte=1 / 40e3, switch_us=7.5)
# Not measured: data sheets. A copy in HBM3 has 2 TB/s, a read over NVLink 4 has 400 GB/s. For ranks
# on one device that read is another copy in its memory.
GPU = Costs(flag_us=1.5, copy_us_per_byte=1 / 2e6, peer_us_per_byte=1 / 400e3)
GPU_ALONE = Costs(flag_us=1.0, copy_us_per_byte=1 / 2e6, peer_us_per_byte=1 / 2e6)
# The largest message whose packs carry their own flags; not measured. It takes twice its bytes on
# the links, once for each peer: 2.3 us for 64 KiB to 7 peers. Staging it takes a fence and two
# latencies of a link. With more peers the bytes cost more than that.
GPU_LL_BYTES, GPU_LL_RANKS = 64 << 10, 8
GPU_LL_BYTES_OF_MANY = 16 << 10

# The most that a CPU rank sends in its flag lines, which could hold more. Measured for five verbs:
# This size ties with staging. Half of it is a tenth quicker in the lines, twice of it 1.3 to 3
# times slower.
INLINE_BYTES = 1 << 10
# The same of two ranks on Intel's CPUs that both give and get. They stage where they have read each
# other's data (csrc/cpu/slots.h), but write flag lines that the peer's cache holds. By turns on a
# Xeon with AMX, an all_reduce of 512 bytes took 0.39 us in the lines, and takes 0.31. An all_gather
# of 2 KiB took 1.1 us, and takes 0.37. At 256 bytes both ways tie. On AMD's CPUs not measured.
EXCHANGED_INLINE_BYTES = 256

# Measured: With a CPU for each rank 128 KiB is best from 2 to 32 MiB. From 32 KiB to 1 MiB it is
# within 8 % of the best. Ranks that share CPUs take turns in every segment, so they take the
# largest. Measured by bench/company.py on a Xeon with AMX, with 8 ranks on 2 CPUs. An all_reduce of
# 16 MiB ran 13 times a second in segments of 64 KiB, and runs 23 to 27 times. One of 1 MiB ran 185
# times, and runs 270 times. By 4 ranks with nothing else running, 16 MiB take 21 % more, and 256
# KiB to 4 MiB 22 to 50 % less.
SEGMENT_BYTES = 128 << 10
SHARED_SEGMENT_BYTES = 256 << 10
# Larger messages come from memory. Single and staged copies tie here, on Xeons and on AMD's.
CACHED_BYTES = 8 << 20
# Where some ranks only give and others only get, both copy at the same time, but for the first
# segment. Measured between 2 cores of a Zen 3, in segments of 32 KiB: Parts of 64 to 256 KiB take 0
# to 30 % less time. Larger ones take up to 26 % more. Smaller ones stay whole, so that their calls
# have two halves (csrc/cpu/halves.h). In a reduce by one_shot the root alone gets. By turns on a
# Xeon with AMX, 128 KiB took 17.5 us in one segment, and takes 13.6.
ONE_WAY = (Verb.broadcast, Verb.gather, Verb.scatter)
ONE_WAY_SEGMENT_BYTES = 32 << 10
ONE_WAY_PART_BYTES = (64 << 10, 256 << 10)


def costs(request: Request, calibrated: Costs | None = None) -> Costs:
    """Return the constants for where the tensors are; `calibrated` are this machine's CPUs'."""
    if not request.on_gpu:
        return calibrated or (AMD if is_amd(request) else CPU)
    return GPU_ALONE if request.ranks_per_gpu == request.world_size else GPU


def is_amd(request: Request) -> bool:
    """Return whether the ranks' CPUs are AMD's."""
    return request.cpu_vendor == "AuthenticAMD"


def is_intel(request: Request) -> bool:
    """Return whether the ranks' CPUs are Intel's."""
    return request.cpu_vendor == "GenuineIntel"


def sync_us(request: Request, costs: Costs) -> float:
    """Return the time of one synchronisation of all ranks."""
    if request.on_gpu:
        return costs.flag_us  # a rank's threads signal all peers at once
    waiting = max(0, request.world_size - request.num_cpus)
    return costs.flag_us * max(1, request.world_size - 1) + costs.switch_us * waiting


def share(request: Request) -> float:
    """Return how many ranks share one CPU or GPU: moving bytes takes that much longer."""
    if request.on_gpu:
        return request.ranks_per_gpu
    return max(1.0, request.world_size / max(1, request.num_cpus))


def fits_inline(request: Request, algorithm: Algorithm) -> bool:
    """Return whether the message can travel with its flags."""
    if not request.on_gpu:
        most = EXCHANGED_INLINE_BYTES if _exchanges_on_intel(request) else INLINE_BYTES
        return request.splits != COUNTED and request.staged_bytes <= most
    if request.splits:
        return False  # no rank knows the sizes of all parts
    num_bytes = request.numel * ITEMSIZE[request.dtype]  # from one rank to another
    is_small = request.world_size <= GPU_LL_RANKS
    most = GPU_LL_BYTES if is_small else GPU_LL_BYTES_OF_MANY
    most = min(most, gpu.max_ll_bytes(request.num_channels))
    return num_bytes <= most and gpu.has_kernel(algorithm, request.verb, request.dtype, ll=True)


def _exchanges_on_intel(request: Request) -> bool:
    is_one_way = request.verb in (*ONE_WAY, Verb.reduce)
    return request.world_size == 2 and not is_one_way and is_intel(request)


def make_plan(request: Request, algorithm: Algorithm, *, may_be_inline: bool = False) -> Plan:
    """Return the plan that runs `request` by `algorithm`; inline if it may be and the data fits."""
    return Plan(
        verb=request.verb,
        dtype=request.dtype,
        op=request.op,
        algorithm=algorithm,
        numel=request.numel,
        root=request.root,
        segment_bytes=_segment_bytes(request, algorithm),
        fast_numerics=request.numerics == "fast",
        inline=may_be_inline and fits_inline(request, algorithm),
        splits=request.splits,
        channels=request.num_channels,
    )


def _segment_bytes(request: Request, algorithm: Algorithm) -> int:
    if request.on_gpu:
        return 0  # the kernel's shape decides, from the plan
    if share(request) > 1:
        return SHARED_SEGMENT_BYTES
    least_bytes, most_bytes = ONE_WAY_PART_BYTES
    part_bytes = request.numel * ITEMSIZE[request.dtype]
    is_one_way = request.verb in ONE_WAY or (
        request.verb is Verb.reduce and algorithm is Algorithm.one_shot
    )
    if is_one_way and least_bytes <= part_bytes <= most_bytes:
        # A scatter's segment has a part for each other rank.
        num_parts = max(1, request.world_size - 1) if request.verb is Verb.scatter else 1
        return min(SEGMENT_BYTES, num_parts * ONE_WAY_SEGMENT_BYTES)
    return SEGMENT_BYTES


def no_kernel(request: Request, algorithm: Algorithm) -> str | None:
    """Return why an algorithm can't run on GPUs if it has to, else None."""
    if not request.on_gpu:
        return None
    if not request.reaches_peers:
        return "the GPUs do not reach each other's memory"
    if gpu.has_kernel(algorithm, request.verb, request.dtype):
        return None
    return f"{algorithm.name} has no GPU kernel for {request.verb.name} of {request.dtype.name}"


def not_a_reduction(request: Request) -> str | None:
    """Return why a reducing algorithm can't run a verb that only moves data, else None."""
    if request.verb in REDUCTIONS:
        return None
    return f"{request.verb.name} only moves data, by direct or single_copy"


def not_plain(request: Request) -> str | None:
    """Return why an algorithm for whole all_reduces and reduce_scatters can't run it, else None."""
    if request.verb is Verb.reduce:
        return "reduce has the algorithms one_shot and two_shot"
    if num_tensors(request.splits):
        return "lists of tensors have the algorithms one_shot and two_shot"
    return not_a_reduction(request)
