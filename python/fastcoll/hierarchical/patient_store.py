# SPDX-License-Identifier: Apache-2.0
"""A store whose waits hold up nobody, and can be ended.

torch's stores keep their one connection while they wait, so two waits of a process stop each other;
this one asks again and again.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store

from fastcoll.bootstrap.deadline import Deadline

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-3, 0.05


class PatientStore(Store):
    """What Gloo and MPI's lanes ask of a store, on another one."""

    def __init__(self, store: Store, prefix: str, limit_s: float, look: Callable[[], None]) -> None:
        """Stand for a part of `store`; `look` raises what ends a wait."""
        super().__init__()
        self._look = look
        self._under = PrefixStore(prefix, store)
        self._limit_s = limit_s

    def set(self, key: str, value: Any) -> None:
        """Write something."""
        self._under.set(key, value)

    def get(self, key: str) -> bytes:
        """Return what was written, once it is there."""
        self.wait([key])
        return self._under.get(key)

    def check(self, keys: list[str]) -> bool:
        """Return whether all of them were written."""
        return bool(self._under.check(keys))

    def add(self, key: str, value: int) -> int:
        """Count."""
        return self._under.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of them were written."""
        deadline = Deadline(self._limit_s if timeout is None else timeout.total_seconds())
        pause_s = _FIRST_PAUSE_S
        while not self.check(keys):
            self._look()
            if deadline.passed():
                raise RuntimeError(f"nobody wrote {keys} within {deadline.limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
