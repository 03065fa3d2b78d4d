# SPDX-License-Identifier: Apache-2.0
"""How many thread blocks may wait on a GPU at once, over all groups of this process.

A kernel that waits for its peers must be resident together with theirs. Blocks that do not fit
would wait for ever for those that do. So every group claims its blocks, and a claim that does not
fit is refused. Decides the count; must not know groups. Other processes on the device are counted
elsewhere: a group's terms count all of its ranks there.
"""

import threading


class Residency:
    """The claims on the devices of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claimed: dict[int, int] = {}

    def free(self, device: int, capacity: int) -> int:
        """Return how many of `capacity` blocks are not claimed."""
        with self._lock:
            return capacity - self._claimed.get(device, 0)

    def claim(self, device: int, num_blocks: int, capacity: int) -> bool:
        """Claim blocks; False if they do not fit."""
        with self._lock:
            claimed = self._claimed.get(device, 0) + num_blocks
            if claimed > capacity:
                return False
            self._claimed[device] = claimed
            return True

    def release(self, device: int, num_blocks: int) -> None:
        """Give claimed blocks back."""
        with self._lock:
            self._claimed[device] -= num_blocks


residency = Residency()
