# SPDX-License-Identifier: Apache-2.0
"""The environment that the ranks of a pool start in."""

import contextlib
import multiprocessing.forkserver
import os
import unittest.mock
from collections.abc import Iterator
from typing import Any

from fastcoll.choose.algorithms import shared
from tests.support.harness import PRELOAD

SHORT_SEGMENT_BYTES = 64 << 10


def take_short_segments(rank: int) -> None:
    """Plan this rank's calls in segments so short that quick tests use every slot again.

    It is a `Setup.prepare`.
    """
    del rank
    shared.SEGMENT_BYTES = shared.SHARED_SEGMENT_BYTES = SHORT_SEGMENT_BYTES


@contextlib.contextmanager
def ranks_with(**env: str) -> Iterator[None]:
    """Let pools that are made meanwhile start ranks in which these are set from the first on.

    `Setup.env` is enough for variables read after that: not for those of the loader or of Python.
    """
    server: Any = multiprocessing.forkserver.ForkServer()
    server.set_forkserver_preload(PRELOAD)
    with unittest.mock.patch.dict(os.environ, env):
        server.ensure_running()
    try:
        with unittest.mock.patch.object(
            multiprocessing.forkserver, "connect_to_new_process", server.connect_to_new_process
        ):
            yield
    finally:
        server._stop()
