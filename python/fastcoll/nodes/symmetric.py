# SPDX-License-Identifier: Apache-2.0
"""Symmetric tensors of a group over several nodes: every node gets its own, or none does.

Decides the error that all ranks raise if a node has no room or if sizes differ. Must not know how
a node shares memory.
"""

from collections.abc import Callable

import torch

from fastcoll.bootstrap.node_map import NodeMap
from fastcoll.errors import DesyncError, DriverError

_NO_ROOM = -1  # in place of a number of bytes
_UNHARMED = "nothing was allocated and the group can still be used"


def agreed(
    made: torch.Tensor | None,
    problem: DesyncError | DriverError | None,
    num_bytes: int,
    node_map: NodeMap,
    gather_words: Callable[[list[int]], list[list[int]]],
    gather_bytes: Callable[[bytes], list[bytes]],
) -> torch.Tensor:
    """Return this node's tensor, once all nodes have theirs. Collective: one transfer.

    Args:
        made: The tensor; None: there is a problem.
        problem: The error that all ranks of this node raised in place of making one.
        num_bytes: The size on this rank.
        node_map: The group's map.
        gather_words: Gathers integers from all ranks.
        gather_bytes: Gathers the reasons, if a node has no room.

    Raises:
        DriverError: A node has no room for it; on all ranks.
        DesyncError: The ranks asked for different sizes; on all ranks.
    """
    word = _NO_ROOM if isinstance(problem, DriverError) else num_bytes
    found = [row[0] for row in gather_words([word])]
    if _NO_ROOM in found:
        lacking = {node_map.places[rank][0]: rank for rank, n in enumerate(found) if n == _NO_ROOM}
        mine = str(problem) if isinstance(problem, DriverError) else ""
        texts = gather_bytes(mine.encode())
        reasons = "; ".join(f"node {node}: {texts[lacking[node]].decode()}" for node in lacking)
        raise DriverError(
            f"empty(): no room for {num_bytes} bytes more of symmetric tensors on "
            f"{node_map.describe(sorted(lacking))}; {_UNHARMED}. {reasons}"
        ) from problem
    if made is None or len(set(found)) > 1:
        sides = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(found))
        raise DesyncError(
            f"empty() needs the same number of bytes on every rank, got {sides}; {_UNHARMED}"
        ) from problem
    return made
