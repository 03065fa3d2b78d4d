# SPDX-License-Identifier: Apache-2.0
"""Where the program makes its calls, for groups that trace (FASTCOLL_DEBUG=trace).

Decides which frames are the program's own, and takes a site along to the thread that carries out
the call. C++ looks it up and writes it beside the call, for errors and for `fastcoll inspect`.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from fastcoll import env
from fastcoll.native import _C


def tracing() -> bool:
    """Return whether a group that is made now notes the time and the site of every call."""
    if env.DEBUG.get() != "trace":
        return False
    # A call of torch.distributed, of DDP or of ours is made where the program called those.
    folders = (Path(__file__).parents[1], Path(torch.__file__).parent)
    _C.hide_folders([f"{folder}{os.sep}" for folder in folders])
    return True


def at_call_site(run: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs in any thread as a call from the caller's site."""
    site = _C.find_call_site()

    def run_there() -> None:
        before = _C.set_call_site(site)
        try:
            run()
        finally:
            _C.set_call_site(before)

    return run_there
