# SPDX-License-Identifier: Apache-2.0
"""Ranks of several nodes that are refused memory or descriptors in a transfer, or for a group."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from tests.faults.test_resources import LIMIT_S, SOON_S, few_descriptors, little_memory
from tests.support.harness import Attempt, Pool, Rank, Setup, attempt

NUMEL = 1 << 26  # of which no byte is touched


def strided_without_memory(rank: Rank, what: str) -> list[Attempt]:
    """Rank 1 has no memory for the copy that travels in place of a strided tensor.

    Returns:
        The errors of the call or transfer, and of the next call.
    """
    group, sends = rank.comm.new_group(timeout_s=3 * LIMIT_S), rank.rank == 1
    tensor = torch.ones(1).expand(NUMEL) if what == "sent" else torch.empty(2 * NUMEL)[::2]
    if rank.rank == 0:
        tensor = torch.empty(NUMEL)
    if what == "received":
        sends = not sends
    start = partial(group.isend if sends else group.irecv, tensor, 1 - rank.rank)
    if what == "reduced":
        start = partial(group.all_reduce, tensor, async_op=True)
    with little_memory(2) if rank.rank == 1 else nullcontext():
        return [attempt(start().wait), attempt(group.barrier)]


@pytest.mark.parametrize("what", ["sent", "received", "reduced"])
def test_a_strided_tensor_between_nodes_without_memory(
    fresh_pool: Callable[..., Pool], what: str
) -> None:
    [told, then], [own, then_too] = fresh_pool(2, Setup(nodes="ab")).run(
        strided_without_memory, what
    )
    assert own.kind == "RuntimeError" and "allocate memory" in own.text, own
    for one in (told, then, then_too):
        assert (one.kind, one.ranks) == ("PeerLostError", (1,)), one
        assert "rank 1 gave " in one.text and "allocate memory" in one.text, one
        assert one.seconds < SOON_S, one


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
