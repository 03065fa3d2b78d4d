# SPDX-License-Identifier: Apache-2.0
"""The memory of a group's symmetric tensors on its GPUs.

There is none until the first of them. From then on it grows by arenas, each a piece of every rank's
memory. All arenas of a rank lie behind each other in addresses that were reserved, so kernels know
a heap by one address. Memory of the route `ipc` can't be placed: it has one arena. Decides how an
arena is made on all ranks or on none. Must not know tensors.
"""

from collections.abc import Callable

from fastcoll.errors import DriverError
from fastcoll.gpu.link import problems, try_together
from fastcoll.gpu.multicast import join_multicast
from fastcoll.gpu.regions import Regions, map_memory
from fastcoll.gpu.terms import VMM
from fastcoll.native import _cuda

# The farthest place that a kernel can be told (GpuLocation in kernels/layout.h). Addresses only.
SPACE_BYTES = 64 << 30


class DeviceHeap:
    """The arenas of all ranks, for the heap that shares them out."""

    def __init__(
        self,
        regions: Regions,
        core: _cuda.Group,
        gather_words: Callable[[list[int]], list[list[int]]],
    ) -> None:
        """Begin without memory; `regions` keep what is taken."""
        # Where each rank's first arena is mapped here; zeros until there is one.
        self.bases = [0] * len(regions.ptrs)
        self.num_bytes = 0  # of all arenas of a rank
        self.gather_words = gather_words
        self._regions = regions
        self._core = core
        self._has_multicast = regions.multicast is not None
        self._is_reserved = False
        self._common = 0  # the address of all heaps at once
        self._places = [0] * len(regions.ptrs)  # reserved here for each rank's heap

    def add_shared_arena(self, num_bytes: int) -> int:
        """Take memory on every rank and return its address here. Collective.

        Raises:
            DriverError: A rank has no room for it; nothing was taken, on no rank.
        """
        regions, size = self._regions, num_bytes
        if (self.num_bytes and regions.route != VMM) or self.num_bytes + size > SPACE_BYTES:
            raise DriverError(
                f"no room for {num_bytes >> 20} MiB more of symmetric tensors on this group's "
                "GPUs: set FASTCOLL_GPU_HEAP_MIB higher before the group's first fastcoll.empty()"
            )
        if not self._is_reserved:
            self._reserve(size)
        places = [place and place + self.num_bytes for place in self._places]
        arena = Regions(regions.route, regions.hellos, size, regions.link, places)
        offers, mine = map_memory(arena)
        if problem := problems(offers) or problems(regions.link.gather({"problem": mine})):
            arena.unmap()
            regions.link.gather({})  # no rank has a peer's arena mapped any more
            arena.free()
            raise DriverError(f"no room for {size >> 20} MiB of symmetric tensors: {problem}")
        regions.arenas.append(arena)
        if not self.num_bytes:
            self.bases[:] = arena.ptrs
        if self._has_multicast:
            place = self._common + self.num_bytes
            self._has_multicast = not join_multicast(arena, regions.link, place=place)
        self.num_bytes += size
        common = self._common if self._has_multicast else 0
        self._core.use_heap(self.bases, self.num_bytes, common)
        return arena.ptrs[regions.link.rank]

    def _reserve(self, size: int) -> None:
        """Reserve addresses for the heap of each rank, and for all of them at once. Collective."""
        regions = self._regions
        if problem := try_together(regions.link, self._take_addresses):
            regions.give_addresses_back()
            self._places = [0] * len(self._places)
            raise DriverError(f"no room for {size >> 20} MiB of symmetric tensors: {problem}")
        self._is_reserved = True

    def _take_addresses(self) -> None:
        regions = self._regions
        if regions.route != VMM:
            return
        for rank in range(len(self._places)):
            if rank == regions.link.rank or not regions.is_offered(rank):
                self._places[rank] = regions.reserve(SPACE_BYTES)
        if self._has_multicast:
            self._common = regions.reserve(SPACE_BYTES)
