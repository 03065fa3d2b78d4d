# SPDX-License-Identifier: Apache-2.0
"""Text for a person to read, perhaps from another process; lines of the log.

Decides which characters a terminal gets, and how long a line may wait for its reader. Must not
know the reason for a line.
"""

import contextlib
import logging
import os
import select
import sys
from functools import cache

from fastcoll.native import _C

LOGGER = logging.getLogger("fastcoll")
# The reader of a pipe may be stopped; a rank with an error to raise does not wait for it.
_PATIENCE_MS = 500
_STDERR = 2
_MOST_CHARACTERS = 1000  # up to four bytes each: an empty page of a pipe (4096 bytes) has room


def printable(text: str) -> str:
    """Return the text as one line, with escapes in place of characters that are not printable.

    For another process's text: it may hold a terminal's control sequences, or line ends.
    """
    return _C.printable(text.encode(errors="replace"))


def printable_lines(text: str) -> str:
    """Return the same, but with the line ends that the text has."""
    return "\n".join(map(printable, text.split("\n")))


def error_in_words(error: BaseException) -> str:
    """Return an error's class and text, which can be encoded; its own code may raise, too."""
    try:
        words = str(error)
    except Exception as another:
        words = f"its text raised {type(another).__name__}"
    named = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return named.encode(errors="replace").decode()


def say(text: str, level: int = logging.WARNING) -> None:
    """Log one line to the logger "fastcoll"; it goes to stderr unless the program has a handler.

    Never raises an `Exception`: a program may have closed stderr, or have replaced it.
    """
    with contextlib.suppress(Exception):
        LOGGER.log(level, "%s", printable(text))


@cache
def say_once(text: str, level: int = logging.WARNING) -> None:
    """Log a line as `say` does, unless this process has done so already."""
    say(text, level)


class _StderrHandler(logging.Handler):
    """Writes lines to stderr, where nothing else handles them; drops one that is not taken soon."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line."""
        others = [*logging.getLogger().handlers, *LOGGER.handlers]
        if others == [self] and _takes_a_line():
            sys.stderr.write(f"fastcoll: {record.getMessage()[:_MOST_CHARACTERS]}\n")


def _takes_a_line() -> bool:
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # no descriptor: a notebook's or a test's stream
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(_PATIENCE_MS))


def open_standard_streams() -> None:
    """Open the null device in place of standard streams that are closed, as a daemon's may be.

    A region, a pipe or a socket would take their numbers, and get what a library prints.
    """
    with contextlib.suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
            os.set_inheritable(descriptor, True)
        os.close(descriptor)


LOGGER.addHandler(_StderrHandler())
