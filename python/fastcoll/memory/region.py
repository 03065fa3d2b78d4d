# SPDX-License-Identifier: Apache-2.0
"""Shared memory without a name, which a rank makes and hands to its peers as a descriptor.

Decides the names that /proc/<pid>/maps shows, and the largest size. Must not know how descriptors
travel.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from fastcoll.errors import DriverError
from fastcoll.memory.heap import ARENA_BYTES
from fastcoll.native import _C

T = TypeVar("T")
GatherBytes = Callable[[bytes], list[bytes]]


def require_room(num_bytes: int, world_size: int, gather_bytes: GatherBytes) -> None:
    """Find out whether every rank can map an arena of each. Collective, by `gather_bytes`.

    Raises:
        DriverError: A rank can't; on all of them, with its reason.
    """
    agree(
        _shortage(num_bytes, world_size),
        f"no room for {num_bytes} bytes more of symmetric tensors on each of {world_size} ranks",
        gather_bytes,
    )


def require_descriptors(world_size: int, gather_bytes: GatherBytes) -> None:
    """Find out whether every rank can take a descriptor of each. Collective, by `gather_bytes`.

    Raises:
        DriverError: A rank can't; on all of them, with its reason.
    """
    shortage = ""
    try:
        with _many(lambda: os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), os.close, world_size):
            pass
    except OSError as error:
        shortage = _reason(error)
    agree(shortage, f"no room for a descriptor of each of {world_size} ranks", gather_bytes)


def agree(problem: str, what: str, gather_bytes: GatherBytes) -> None:
    """Let all ranks raise, or none. Collective, by `gather_bytes`.

    Args:
        problem: Why this rank can't go on; empty if it can.
        what: The missing resource, for the text of the error.
        gather_bytes: Gathers bytes from all ranks.

    Raises:
        DriverError: A rank has a problem; on all of them.
    """
    found = gather_bytes(problem.encode())
    if lacking := [f"rank {rank}: {text.decode()}" for rank, text in enumerate(found) if text]:
        raise DriverError(
            f"{what} ({'; '.join(lacking)}); nothing was allocated and the group can still be used"
        )


def _shortage(num_bytes: int, world_size: int) -> str:
    """Return why this process can't make an arena and map one of each rank; "" if it can.

    Pages come with their first use, so the kernel would refuse too late: by killing a process that
    writes. Of an arena of the usual size few may ever be used.
    """
    if num_bytes > ARENA_BYTES and num_bytes * world_size > _machine_bytes():
        return "its machine has less memory"
    try:
        fd = create_arena(num_bytes)
    except DriverError as error:
        return f"it can't make an arena: {error}"

    def map_it() -> mmap.mmap:  # which takes a descriptor of its own, as one of a peer's would
        return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)

    try:
        with _many(map_it, mmap.mmap.close, world_size):
            return ""
    except OSError as error:
        return f"it can't map as much: {_reason(error)}"
    finally:
        os.close(fd)


@contextlib.contextmanager
def _many(make: Callable[[], T], close: Callable[[T], None], count: int) -> Iterator[None]:
    """Have so many of something at once, for a moment."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.callback(close, make())
        yield


def _reason(error: OSError) -> str:
    return f"{error.strerror}{_C.limit_behind(error.errno or 0)}"


def _machine_bytes() -> int:
    """Return the size of memory and swap."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        kibibytes = dict(line.split()[:2] for line in lines)
        return (int(kibibytes["MemTotal:"]) + int(kibibytes["SwapTotal:"])) << 10
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def create_region(world_size: int) -> int:
    """Return a descriptor of this rank's new pad, scratch and channels; the caller's to close."""
    return _C.create_region(world_size)


def create_arena(num_bytes: int) -> int:
    """Return a descriptor of a new arena of the symmetric heap; the caller's to close."""
    return _C.memfd_create("fastcoll-arena", num_bytes)
