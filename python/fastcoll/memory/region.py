# SPDX-License-Identifier: Apache-2.0
"""Shared memory without a name: what a rank makes and hands to its peers as a descriptor.

Decides the names that /proc/<pid>/maps shows, and what is too large. Must not know how descriptors
travel.
"""

import contextlib
import mmap
import os
from collections.abc import Callable

from fastcoll import _C
from fastcoll.errors import DriverError
from fastcoll.memory.heap import ARENA_BYTES

# What a rank may lack for an arena, by the number under which it tells the others.
_SHORTAGES = ("", "its machine has less memory", "it can't map as much")


def require_room(
    num_bytes: int, world_size: int, gather_words: Callable[[list[int]], list[list[int]]]
) -> None:
    """Find out whether every rank can map an arena of each. Collective, by `gather_words`.

    Raises:
        DriverError: A rank can't; on all of them.
    """
    found = gather_words([_shortage(num_bytes, world_size)])
    if lacking := [f"rank {rank}: {_SHORTAGES[n]}" for rank, [n] in enumerate(found) if n]:
        raise DriverError(
            f"no room for {num_bytes} bytes more of symmetric tensors on each of {world_size} "
            f"ranks ({', '.join(lacking)}); nothing was allocated and the group can still be used"
        )


def _shortage(num_bytes: int, world_size: int) -> int:
    """Return what this process lacks to map an arena of each rank; 0: nothing.

    Pages come with their first use, so the kernel would refuse too late: by killing who writes. Of
    an arena of the usual size few may ever be used.
    """
    if num_bytes > ARENA_BYTES and num_bytes * world_size > _machine_bytes():
        return 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:  # not for writing, or the kernel would count it as used
        mmap.mmap(-1, num_bytes * world_size, flags, mmap.PROT_READ).close()
    except (OSError, OverflowError):
        return 2
    return 0


def _machine_bytes() -> int:
    """Return the size of memory and swap."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        kibibytes = dict(line.split()[:2] for line in lines)
        return (int(kibibytes["MemTotal:"]) + int(kibibytes["SwapTotal:"])) << 10
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def create_region(world_size: int) -> int:
    """Return a descriptor of this rank's new pad, scratch and channels; the caller's to close."""
    return _C.memfd_create("fastcoll-region", _C.mapped_bytes(world_size))


def create_arena(num_bytes: int) -> int:
    """Return a descriptor of a new arena of the symmetric heap; the caller's to close."""
    return _C.memfd_create("fastcoll-arena", num_bytes)
