# SPDX-License-Identifier: Apache-2.0
"""How many thread blocks may wait on a GPU at once, over all groups of this process.

A kernel that waits for its peers must be resident together with theirs. A block that does not fit
would wait for ever for those that do. Decides which blocks of a device a group has. Must not know
groups. Other processes on the device are counted elsewhere: a group's terms count all its ranks
there.

The rule. A group has blocks of its own, or it shares one set of blocks with later groups. All
groups with blocks of their own, and that set, fit on the device together. Of the groups that share
it, one kernel at a time runs on the device: each waits for the one launched before it
(csrc/cuda/launch_order.h). All ranks make the calls of such groups in the same order. They do so
for calls in one stream, too, which runs one kernel at a time whatever its blocks.

The proof. Take a group with blocks of its own. At most one of its kernels runs on a rank, and no
other group uses its blocks. So a kernel finds them free, and is resident on each rank as soon as
that rank has launched it. It waits for launches alone, not for other groups' kernels. Of the
kernels that share, take the first in the common order that has not ended on some rank. All kernels
before it have ended on every rank. So on a rank that has launched it nothing that shares is ahead
of it. The whole set is free for it, and it is resident. It waits for launches alone, too. By
induction every kernel ends once all ranks have launched it. Kernels that wait for no rank end by
themselves. tests/gpu_host/test_gpu_residency.py explores this rule, and each rule with a part less.

A kernel may start once the one before it in its stream waits for no rank any more: see "Early
starts" in kernels/README.md. That one ends by itself. So blocks are taken twice for a moment only,
and the proof holds.

In another order on another rank two kernels may wait for each other, up to their limit. In a
captured graph the rule orders the calls of the capture. Replays and eager calls are ordered by the
streams in which the program starts them.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

# The part of a device that groups share once a group finds too few blocks of its own. Not measured:
# a quarter is 27 blocks of an A100, 33 of an H100, 37 of a B200, near what one group takes.
SHARED_PART = 4


@dataclass(frozen=True)
class Blocks:
    """A device's blocks, for a group that is being made."""

    capacity: int  # the blocks that it holds
    free: int  # those that belong to no group and to no set that is shared
    shared: int  # those of the set that groups share, or that they would share
    is_sharing: bool  # whether groups share it already


@dataclass(frozen=True)
class Claim:
    """A group's right to blocks."""

    begins_sharing: bool  # whether it is the first of the groups that share
    release: Callable[[], None]  # gives the blocks back


@dataclass
class _Device:
    owned: int = 0  # blocks of groups with their own
    shared: int = 0  # of the set; 0: no group shares
    num_sharing: int = 0


class Residency:
    """The claims on the devices of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._devices: dict[int, _Device] = {}

    def blocks(self, device: int, capacity: int) -> Blocks:
        with self._lock:
            taken = self._devices.get(device, _Device())
            free = capacity - taken.owned - taken.shared
            shared = taken.shared or min(max(1, capacity // SHARED_PART), free)
            return Blocks(capacity, free, shared, taken.num_sharing > 0)

    def claim(self, device: int, num_blocks: int, capacity: int) -> Claim | None:
        """Claim blocks for one group alone; None if they do not fit."""
        with self._lock:
            taken = self._devices.setdefault(device, _Device())
            if taken.owned + taken.shared + num_blocks > capacity:
                return None
            taken.owned += num_blocks
        return Claim(False, lambda: self._release(device, num_blocks))

    def share(self, device: int, num_blocks: int, capacity: int) -> Claim | None:
        """Join the groups that share a set of blocks, of which this one needs so many at once.

        The first one sets it aside, as large as `blocks` told. None if it does not fit.
        """
        state = self.blocks(device, capacity)
        with self._lock:
            taken = self._devices.setdefault(device, _Device())
            begins = taken.num_sharing == 0
            size = state.shared if begins else taken.shared
            if num_blocks > size or (begins and taken.owned + size > capacity):
                return None
            taken.shared = size
            taken.num_sharing += 1
        return Claim(begins, lambda: self._leave(device))

    def _release(self, device: int, num_blocks: int) -> None:
        with self._lock:
            self._devices[device].owned -= num_blocks

    def _leave(self, device: int) -> None:
        with self._lock:
            taken = self._devices[device]
            taken.num_sharing -= 1
            if taken.num_sharing == 0:
                taken.shared = 0


residency = Residency()
