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
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.harness import Rank

# Each program has a number, so it does not find in the session's store an earlier one's words.
NUMBERS = itertools.count()


@contextlib.contextmanager
def launched(rank: Rank, number: int) -> Iterator[None]:
    """Make the environment that of a rank of torchrun, whose store is the session's."""
    store: Any = rank.store.underlying_store
    variables = {
        "RANK": rank.rank,
        "WORLD_SIZE": rank.world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": number,
    }
    with mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
        yield


def run_launched(rank: Rank, path: Path, number: int) -> str:
    """Run a program as torchrun would; return what it printed. `number` is the next of NUMBERS."""
    printed = io.StringIO()
    with launched(rank, number), contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()
