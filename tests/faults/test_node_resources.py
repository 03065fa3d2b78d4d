# SPDX-License-Identifier: Apache-2.0
"""Ranks of several nodes that are refused descriptors in a transfer, or for a group."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.faults.test_resources import LIMIT_S, SOON_S, few_descriptors
from tests.support.harness import Attempt, Pool, Rank, Setup, attempt

THREE = torch.ones(3)
# The calls that connect to another node, and so few descriptors that just the connection fails.
CONNECTING: dict[str, tuple[Callable[[Any], object], int]] = {
    "group": (lambda group: group.new_group(), 3),
    "send": (lambda group: group.send(THREE, 0) if group.rank else group.recv(THREE), 1),
    "recv": (lambda group: group.recv(THREE, 0) if group.rank else group.send(THREE, 1), 1),
}


def connect_with_few(rank: Rank, what: str, more: int) -> Attempt:
    """Connect to another node; rank 1 has few descriptors, or some more."""
    connect, left = CONNECTING[what]
    with (
        rank.comm.new_group(timeout_s=LIMIT_S) as group,
        few_descriptors(left + more) if rank.rank == 1 else nullcontext(),
    ):
        return attempt(connect, group)


@pytest.mark.parametrize("what", CONNECTING)
def test_who_has_no_descriptors_between_nodes_says_so(
    fresh_pool: Callable[..., Pool], what: str
) -> None:
    pool = fresh_pool(2, Setup(nodes="ab"))
    for one in pool.run(connect_with_few, what, 0):
        assert one.kind == "DriverError", one
        assert "rank 1 has less than" in one.text and "RLIMIT_NOFILE is" in one.text, one
        assert one.seconds < SOON_S, one
    assert [one.kind for one in pool.run(connect_with_few, what, 20)] == ["", ""]
