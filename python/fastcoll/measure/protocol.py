# SPDX-License-Identifier: Apache-2.0
"""The words between the process that measures and the rank processes.

Commands are single lines, so that mpi_loop.c can read them with sscanf; replies are single lines
of JSON. A rank that waits for a command is blocked in a read: it takes no CPU from the library
whose turn it is. Knows nothing of libraries.

    prepare VERB DTYPE OP NUMEL ROOT    allocate, check one call -> {"num_wrong": N}
    time ITERATIONS WINDOWS             -> {"seconds": [...], "idle_cpu_s": S}
    choose ALGORITHM SEGMENT_BYTES      how to carry out the calls prepared now or later
    terms                               the agreement of the ranks -> {"num_channels": N, ...}
    flag ITERATIONS                     one-way flag of fastcoll's pads -> {"seconds": S}
    release                             free the buffers of prepare
    quit
"""

import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcoll.measure.pattern import Cell

Reply = dict[str, Any]
_CONNECT_LIMIT_S = 20.0


@dataclass
class Line:
    """One end of a connection that carries lines."""

    connection: socket.socket

    def __post_init__(self) -> None:
        self._file = self.connection.makefile("r", encoding="utf-8")

    def send(self, text: str) -> None:
        self.connection.sendall(text.encode() + b"\n")

    def receive(self) -> str:
        """Return the next line, "" once the other end is gone."""
        return self._file.readline().strip()

    def send_reply(self, reply: Reply) -> None:
        self.send(json.dumps(reply))

    def close(self) -> None:
        self._file.close()
        self.connection.close()


def connect(path: str, rank: int) -> Line:
    """Connect to the process that measures and say which rank this is.

    Raises:
        OSError: That process is gone.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + _CONNECT_LIMIT_S
    while True:
        try:
            connection.connect(path)
            break
        except (FileNotFoundError, ConnectionRefusedError):
            # Under torchrun a rank may be faster than the process that listens. But if the folder
            # is gone, or the socket refuses for long, that process has ended.
            if not Path(path).parent.is_dir() or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    line = Line(connection)
    line.send_reply({"rank": rank})
    return line


def prepare_command(cell: Cell) -> str:
    return f"prepare {cell.verb} {cell.dtype} {cell.op} {cell.numel} {cell.root}"


def parse_prepare(words: list[str], world_size: int) -> Cell:
    """Return the cell of a prepare line's words after the first."""
    verb, dtype, op, numel, root = words
    return Cell(verb, dtype, op, int(numel), world_size, int(root))
