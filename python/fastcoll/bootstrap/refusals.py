# SPDX-License-Identifier: Apache-2.0
"""What the operating system refuses while a group is made: no descriptors left, no memory.

Decides how that is said. Must not know what was tried.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from fastcoll.errors import DriverError

NO_DESCRIPTORS = (
    "this process may not open more files: raise its limit (ulimit -n); a group takes two "
    "descriptors for every rank of its node, and as many again while it is made"
)
_HINTS = {
    errno.EMFILE: NO_DESCRIPTORS,
    errno.ENFILE: "this machine may not open more files (fs.file-max)",
    errno.ENOMEM: "there is no memory left, or this process may not use more of it (ulimit -v)",
}


def explain(error: OSError) -> str:
    """Return what was refused, and what to do about it if that is known."""
    hint = _HINTS.get(error.errno or 0)
    return f"{error}: {hint}" if hint else str(error)


@contextmanager
def as_driver_error(what: str) -> Iterator[None]:
    """Raise a DriverError in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise DriverError(f"{what}: {explain(error)}") from error
