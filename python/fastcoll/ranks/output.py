# SPDX-License-Identifier: Apache-2.0
"""The output of a rank, line by line, each with the rank before it.

Decides where a line ends: also at a carriage return, by which progress bars begin anew. Knows no
process.
"""

import re
from collections.abc import Callable

Sink = Callable[[bytes], None]

_BETWEEN = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")
# A line without an end is not kept for ever.
_MOST_BYTES = 1 << 16


class Lines:
    """Passes on the lines of one stream of one rank."""

    def __init__(self, prefix: bytes, sink: Sink) -> None:
        self._prefix = prefix
        self._sink = sink
        self._rest = b""
        self.last = b""  # the last line that is not blank
        self.raised = b""  # the first line of the last error that has a traceback
        self._in_traceback = False

    def feed(self, data: bytes) -> None:
        """Pass on the lines that are complete by now."""
        *lines, self._rest = _BETWEEN.split(self._rest + data)
        if len(self._rest) > _MOST_BYTES:
            lines.append(self._rest + b"\n")
            self._rest = b""
        for line in lines:
            self._look(line)
        if lines:
            self._sink(b"".join(self._prefix + line for line in lines))

    def _look(self, line: bytes) -> None:
        if not line.strip():
            return
        self.last = line
        if line.startswith(b"Traceback (most recent call last):"):
            self._in_traceback = True
        elif self._in_traceback and not line.startswith(b" "):
            self._in_traceback, self.raised = False, line

    def finish(self) -> None:
        """Pass on a last line that has no end."""
        if self._rest:
            self.feed(b"\n")
