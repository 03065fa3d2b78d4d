# SPDX-License-Identifier: Apache-2.0
"""Carriers that their owners have left, whose transfers may still run.

Decides how long they are kept, and the memory that their transfers use: until all of these have
ended. That is so at the latest when the peers have left the carrier, too. The end of a carrier of
Gloo's waits for that. To keep one for ever takes threads, descriptors and memory. Must not know the
owners.
"""

import itertools
import os
from contextlib import suppress

from fastcoll.nodes.carriers.carrier import Carrier

_numbers = itertools.count()
_given_up: dict[int, tuple[Carrier, tuple[object, ...]]] = {}
# The carriers that a forked child inherits have none of their threads.
os.register_at_fork(after_in_child=_given_up.clear)


def give_up(carrier: Carrier, *memory: object) -> None:
    """Keep a carrier, and memory that its transfers use, until these have ended."""
    carrier.abandon()  # as this process may end before
    _given_up[next(_numbers)] = carrier, memory


def let_go() -> None:
    """Let go of the carriers whose transfers have ended after all."""
    for number, (carrier, _) in list(_given_up.items()):
        if carrier.is_over():
            with suppress(KeyError):  # another thread, or a signal handler, has found it, too
                del _given_up[number]
                carrier.resume()
