# SPDX-License-Identifier: Apache-2.0
"""The end of fastcoll in a process that ends.

Decides when it comes. A program's handlers of `atexit` may make calls, and handlers run in the
opposite order of their registration. So fastcoll has one handler, which this module registers. Each
`import torch` loads it, and comes before nearly all handlers that make calls.
"""

import atexit
from collections.abc import Callable
from contextlib import ExitStack

at_the_end: list[Callable[[], object]] = []  # what ends the parts of fastcoll, the last one first


def _end() -> None:
    """End the parts; an error of one keeps no other from its end."""
    with ExitStack() as parts:
        for end in at_the_end:
            parts.callback(end)


atexit.register(_end)
