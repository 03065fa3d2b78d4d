# SPDX-License-Identifier: Apache-2.0
"""Torch's functions and operators as fastcoll calls them: no mode of the program sees them.

Decides how torch's functions and operators are hidden. Must not know calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Hide torch's functions and operators from the program's modes: they are not its own."""
    if torch._C._len_torch_dispatch_stack() == 0 and torch._C._len_torch_function_stack() == 0:
        yield
        return
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield
