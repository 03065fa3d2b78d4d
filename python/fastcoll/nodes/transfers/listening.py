# SPDX-License-Identifier: Apache-2.0
"""Carriers that wait for a header when their channel ends.

Decides how long they are kept: until the peer has left them, too. The end of a carrier of Gloo's
waits for that, and to keep one for ever takes threads and memory. Must not know channels.
"""

import os
from contextlib import suppress

import torch

from fastcoll.nodes.carriers.carrier import Carrier, Started

# A header, its transfer, and their carrier, by the carrier's identity.
_listening: dict[int, tuple[torch.Tensor, Started, Carrier]] = {}
# The carriers that a forked child inherits have none of their threads.
os.register_at_fork(after_in_child=_listening.clear)


def keep_listening(header: torch.Tensor, started: Started, carrier: Carrier) -> None:
    """Keep a carrier that waits for a header; let go of those whose peers have left."""
    carrier.abandon()  # as this process may end before
    _listening[id(carrier)] = header, started, carrier
    for key, (_, other, left) in list(_listening.items()):
        if other.is_completed():
            with suppress(KeyError):  # another thread has found it, too
                del _listening[key]
                left.resume()
