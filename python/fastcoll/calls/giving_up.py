# SPDX-License-Identifier: Apache-2.0
"""The end of a node's group for a rank that can't make its call, as it has no memory for a copy.

Decides the words that its peers hear. Must not know what is copied.
"""

from contextlib import suppress

from fastcoll.bootstrap.farewell import KINDS
from fastcoll.errors import FastcollError, PeerLostError
from fastcoll.native import _C
from fastcoll.text import error_in_words


def give_up(group: _C.Group, what: str, error: BaseException) -> None:
    """Tell the group the error of this rank's own for which it gives up a call or transfer.

    A FastcollError is not told: all ranks have it, or it leaves the group usable.
    """
    if isinstance(error, FastcollError):
        return
    said = f'rank {group.rank} gave up {what} in group "{group.name}": {error_in_words(error)}'
    with suppress(FastcollError):  # it throws the verdict; or the group is closed
        group.fail(KINDS[PeerLostError], said, [group.rank])
