# SPDX-License-Identifier: Apache-2.0
"""The environment that the ranks of a pool start in."""

import contextlib
import multiprocessing.forkserver
import os
import unittest.mock
from collections.abc import Iterator
from typing import Any

from tests.support.harness import PRELOAD


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
