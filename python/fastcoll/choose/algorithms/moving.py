# SPDX-License-Identifier: Apache-2.0
"""The cost of verbs that only move data: the bytes that each rank gives and gets, and their price.

Decides the constants of staging and of single copies on CPUs. Must not know which wins.
"""

from dataclasses import dataclass

from fastcoll.choose.algorithms import shared
from fastcoll.choose.costs import Costs
from fastcoll.types import COUNTED, ITEMSIZE, Request, Verb, num_tensors


@dataclass(frozen=True)
class Prices:
    """Microseconds per byte."""

    give: float  # to copy a message into scratch
    get: float  # to copy a peer's staged message
    read: float  # to copy out of a peer's private memory (process_vm_readv)


# measured between 2 cores: `fastcoll bench all_gather` and `broadcast` beside Open MPI, which reads
# private memory. An AMD core reads a peer's cache lines quicker than the kernel copies. An Intel
# core does not. It writes cache lines that the peer has read at half its speed.
_CACHED = {
    "GenuineIntel": Prices(give=1 / 50e3, get=1 / 20e3, read=1 / 16e3),
    "AuthenticAMD": Prices(give=1 / 50e3, get=1 / 30e3, read=1 / 13e3),
}
# Messages that don't fit in a cache come from memory, in all three ways: 64 MiB on Intel, 16 and
# 64 MiB on AMD.
_LARGE = {
    "GenuineIntel": Prices(give=1 / 6.3e3, get=1 / 6.3e3, read=1 / 4.2e3),
    "AuthenticAMD": Prices(give=1 / 15e3, get=1 / 15e3, read=1 / 6e3),
}
_CALL_US = 2.0  # of the kernel, for a piece of memory to be read: fits 256 KiB on a Xeon
# The assumed size of parts whose size only their two ranks know: one for which the way matters.
# Small ones are staged in any case.
_COUNTED_BYTES = 1 << 20

_TURN_BYTES = 64 << 10  # of a scatter's segment when its turns were fitted
# Staged parts of so many bytes are fetched past the caches: CopyWays::fetched_past_caches in csrc.
_PAST_CACHES_BYTES = 32 << 20

_SYMMETRIC = (Verb.all_gather, Verb.all_to_all)


def _prices(request: Request, calibrated: Costs | None, most_bytes: int) -> Prices:
    table = _LARGE if most_bytes > shared.CACHED_BYTES else _CACHED
    prices = table.get(request.cpu_vendor, table["GenuineIntel"])
    if not request.on_gpu and calibrated is None:
        return prices
    costs = shared.costs(request, calibrated)
    # Of single copies nothing is fitted. They keep their relation to staged ones: a fitted price
    # beside one of other origin would choose by the machine, not by the way.
    return Prices(
        give=costs.copy_us_per_byte,
        get=costs.peer_us_per_byte,
        read=prices.read / prices.get * costs.peer_us_per_byte,
    )


def _bytes(request: Request) -> tuple[int, int]:
    """Return the bytes of the rank that gives most, and of the rank that gets most."""
    part = request.numel * ITEMSIZE[request.dtype]
    if request.splits == COUNTED:
        part = _COUNTED_BYTES
    elif request.splits and not num_tensors(request.splits):  # numel counts all parts
        part //= request.world_size
    peers = request.world_size - 1
    gives = part * peers if request.verb in (Verb.all_to_all, Verb.scatter) else part
    gets = part if request.verb in (Verb.broadcast, Verb.scatter) else part * peers
    return gives, gets


def _moving_us(request: Request, give_us: float, get_us: float) -> float:
    """Return the time of the copies; linear in both, as a model fitted to measurements must be."""
    ranks, share = request.world_size, shared.share(request)
    if request.verb in _SYMMETRIC:
        if share == 1 and not request.on_gpu and not shared.is_amd(request):
            give_us *= 2  # of lines that the peer has read: fits 512 KiB, 2 ranks on two Xeons
        return (give_us + get_us) * share
    if share > 1:  # all the work, on the CPUs that there are
        if request.verb is Verb.gather:
            return ((ranks - 1) * give_us + get_us) * share / ranks
        return (give_us + (ranks - 1) * get_us) * share / ranks
    # The root's copies run beside the others'. Only a scatter's root has more to do: its own part
    # comes on top.
    return give_us + get_us if request.verb is Verb.scatter else get_us


def _evicted(request: Request) -> float:
    """Return how many times as long as from a cache it takes to get parts.

    Fits where single copies win with 4 ranks on 2 CPUs: an all_to_all takes them from 512 KiB on. A
    broadcast stays staged on all CPUs, 10 to 25 % quicker on a Xeon of model 207.
    """
    return {Verb.all_to_all: 2.5, Verb.all_gather: 1.5}.get(request.verb, 1.0)


def _slowdown(request: Request) -> float:
    """Return how many times as long a single copy takes because it reads lines before it writes.

    Staged parts are written past the caches then. By turns on a Xeon with AMX, an all_gather of
    parts of 32 MiB took 9.5 ms in single copies, and takes 7.6 staged. With 4 ranks on 2 CPUs it
    took 45 ms, and takes 28. Smaller parts, an all_to_all and a scatter gain nothing.
    """
    if request.on_gpu or not shared.is_intel(request) or request.verb is not Verb.all_gather:
        return 1.0
    return 2.5 if _bytes(request)[0] >= _PAST_CACHES_BYTES else 1.0


def staged_us(request: Request, calibrated: Costs | None) -> float:
    """Return the modelled time of a call whose messages are staged."""
    gives, gets = _bytes(request)
    prices = _prices(request, calibrated, max(gives, gets))
    costs = shared.costs(request, calibrated)
    if not request.on_gpu and shared.share(request) > 1:
        # Parts leave the shared caches before they are read, more so if each rank has its own.
        gets = int(gets * _evicted(request))
    from_root = request.verb in (Verb.broadcast, Verb.scatter)
    if request.on_gpu and from_root and shared.share(request) == 1:
        gets *= request.world_size - 1  # all leave by the root's one link
    moving_us = _moving_us(request, gives * prices.give, gets * prices.get)
    return shared.sync_us(request, costs) + moving_us + _scheduling_us(request, gives, costs)


def _scheduling_us(request: Request, gives: int, costs: Costs) -> float:
    """Return the time that a scatter waits for its root, which stages the segments of all ranks.

    Where ranks share CPUs each of these is a turn of the scheduler. Fits 1 to 16 MiB in segments of
    64 KiB, 4 ranks on 2 cores, `fastcoll regret`.
    """
    if request.verb is not Verb.scatter or request.on_gpu or shared.share(request) == 1:
        return 0.0
    return gives / _TURN_BYTES * costs.switch_us


def read_us(request: Request, calibrated: Costs | None) -> float:
    """Return the modelled time of a call whose messages are read where they lie."""
    gives, gets = _bytes(request)
    prices = _prices(request, calibrated, max(gives, gets))
    # Twice: the owner waits until its message has been read.
    waiting_us = 2 * shared.sync_us(request, shared.costs(request, calibrated)) + _CALL_US
    return waiting_us + _moving_us(request, 0, gets * prices.read * _slowdown(request))
