# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks of a new group copy out of each other's private memory.

Decides the common setting from the outcome of every rank's attempt. Must not know how a copy is
made, nor which call is worth one.
"""

import errno
import os
from collections.abc import Callable

from fastcoll import env
from fastcoll.types import SingleCopy


def agree(try_all: Callable[[bool, bool], list[int]]) -> tuple[SingleCopy, str]:
    """Return the setting that holds for all ranks, and the reason. Collective.

    Args:
        try_all: Reads a sample of every rank's memory, and returns the outcome of all ranks, an
            errno, by rank; collective. The first argument is False where this rank does not want
            to. The second is True where messages are copied even if their sender could send them.

    Raises:
        UsageError: FASTCOLL_SINGLE_COPY has a value that it can't have.
        CollectiveTimeout: A rank did not come within the limit.
        PeerLostError: A rank died on the way.
    """
    wanted = env.SINGLE_COPY.get()
    for rank, error in enumerate(try_all(wanted != "never", wanted == "always")):
        if error == errno.ECANCELED:
            return "never", f"rank {rank} has FASTCOLL_SINGLE_COPY=never"
        if error:
            return "never", f"rank {rank} can't read every rank's memory: {os.strerror(error)}"
    return ("always" if wanted == "always" else "auto"), "every rank reads every rank's memory"
