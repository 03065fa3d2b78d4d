# SPDX-License-Identifier: Apache-2.0
"""Whether the current stream is being captured in a graph, and asking about events while one is.

Decides nothing. Must not know calls.
"""

import torch


def is_capturing() -> bool:
    """Return whether the current stream is being captured."""
    return torch.cuda.is_current_stream_capturing()


def ignore_captures(device: int) -> None:
    """Let this thread ask about a GPU's events while another one captures."""
    from fastcoll.native import _cuda  # only now: without GPUs there may be no such extension

    _cuda.ignore_captures(device)


def enter_thread(device: int) -> None:
    """Begin a thread that asks about a GPU's events, and about no other GPU's.

    CUDA makes a context on GPU 0 for a thread that asks without a device of its own.
    """
    torch.cuda.set_device(device)
    ignore_captures(device)
