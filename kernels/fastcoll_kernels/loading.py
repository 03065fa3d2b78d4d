# SPDX-License-Identifier: Apache-2.0
"""The code that Triton has compiled for a launch, and the time when it comes to the device.

Decides nothing else. Loading may wait for kernels that run, so a program loads code before it
starts a kernel that waits for a peer.
"""

from typing import Any


def is_loaded(code: Any) -> bool:
    """Return whether compiled code is on its device; the interpreter's, which is None, needs none.

    Args:
        code: The result of a kernel's `warmup`.
    """
    return code is None or code.module is not None


def load(code: Any) -> None:
    """Bring compiled code to the current device."""
    if code is not None:
        _ = code.run  # Triton loads it when it is first asked for its launcher
