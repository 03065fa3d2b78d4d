# SPDX-License-Identifier: Apache-2.0
"""Programs for torchrun, run by the ranks of a pool.

A start of torchrun takes longer than all examples together, so the environment of a rank is made to
look like that of torchrun.
"""

import contextlib
import io
import itertools
import os
import runpy
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.harness import Rank

# Each program has a number, so it does not find in the session's store an earlier one's words.
NUMBERS = itertools.count()


def free_port() -> int:
    """Return a port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def launched(rank: Rank, number: int, port: int | None) -> Iterator[None]:
    """Make the environment that of a rank of torchrun; its store is the session's, or at a port."""
    store: Any = rank.store.underlying_store
    variables = {
        "RANK": rank.rank,
        "WORLD_SIZE": rank.world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port or store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": number,
    }
    with mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
        yield


def run_launched(rank: Rank, path: Path, number: int, port: int | None = None) -> str:
    """Run a program as torchrun would; return what it printed.

    Args:
        rank: The rank of a pool.
        path: The program.
        number: The next of NUMBERS.
        port: That of a store of the program's own. It needs one if it calls `init_process_group`:
            torch would find there the addresses of an earlier program's ranks.
    """
    printed = io.StringIO()
    with launched(rank, number, port), contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()
