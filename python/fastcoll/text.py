# SPDX-License-Identifier: Apache-2.0
"""Lines for a person to read, on stderr.

Decides how long a line may wait for its reader. Must not know the reason for a line.
"""

import contextlib
import select
import sys
from functools import cache

# The reader of a pipe may be stopped; a rank with an error to raise does not wait for it.
_PATIENCE_MS = 500
_MOST_CHARACTERS = 1000  # up to four bytes each: an empty page of a pipe (4096 bytes) has room


def say(text: str) -> None:
    """Write one line to stderr, or drop the line if stderr does not take it soon.

    Never raises an `Exception`: a program may have closed stderr, or have replaced it.
    """
    with contextlib.suppress(Exception):
        if _takes_a_line():
            sys.stderr.write(f"fastcoll: {text[:_MOST_CHARACTERS]}\n")


@cache
def say_once(text: str) -> None:
    """Write a line as `say` does, unless this process has written it already."""
    say(text)


def _takes_a_line() -> bool:
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # no descriptor: a notebook's or a test's stream
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(_PATIENCE_MS))
