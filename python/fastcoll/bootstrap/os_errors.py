# SPDX-License-Identifier: Apache-2.0
"""Errors of the operating system while a group is made: no descriptors left, no memory.

Decides which errors these are, and their texts. Must not know the failed step.
"""

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from fastcoll.errors import DriverError
from fastcoll.native import _C

_USE = (
    "a group takes one descriptor for every rank of its node, the first one three, and each three "
    "more while it is made"
)

# A process near its limit runs out of memory in Python itself, too, which has its own error.
REFUSALS = (OSError, MemoryError)


def explain(error: OSError | MemoryError) -> str:
    """Return the refused call, the limit that refused it, and the remedy if that is known."""
    if isinstance(error, MemoryError):
        where = error.__traceback__
        error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)).with_traceback(where)
    use = f"; {_USE}" if error.errno == errno.EMFILE else ""
    return f"{error}{_in_call(error)}{_C.limit_behind(error.errno or 0)}{use}"


def _in_call(error: OSError) -> str:
    """Return the line that made the refused system call: the error itself names only its number."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" in `{frames[-1].line}`" if frames and frames[-1].line else ""


def no_free_descriptor(rank: int) -> DriverError:
    """Return the error of a process that had no room for a descriptor that a rank sent."""
    limit = _C.limit_behind(errno.EMFILE)
    return DriverError(f"no place for a descriptor of rank {rank}{limit}; {_USE}")


@contextmanager
def as_driver_error(what: str) -> Iterator[None]:
    """Raise a DriverError in place of one of REFUSALS."""
    try:
        yield
    except REFUSALS as error:
        raise DriverError(f"{what}: {explain(error)}") from error
