# SPDX-License-Identifier: Apache-2.0
"""Nodes that call with other parts or split sizes end in one DesyncError on every rank, and soon.

In a header and beyond. That each field is compared stands in contract/test_differences.py.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch

from tests.support.harness import LATE_S, Attempt, Pool, Rank, Setup, attempt

GOAL_S = 2.0  # on a machine that is not loaded; LATE_S is what is asserted
LARGE = 30_000  # elements: beyond a packet
# Of a group, a number of elements, and whether this rank's node differs.
DifferingCall: TypeAlias = Callable[[Any, int, bool], None]


def parts_of(comm: Any, numel: int, extra: int) -> list[torch.Tensor]:
    """Uneven parts; `extra` moves elements from the last to the first, so the sum is the same."""
    sizes = [numel + rank for rank in range(comm.world_size)]
    sizes[0] += extra
    sizes[-1] -= extra
    return [torch.ones(size) for size in sizes]


def all_gather_uneven(comm: Any, numel: int, other: bool) -> None:
    parts = parts_of(comm, numel, 1 if other else 0)
    comm.all_gather(parts, parts[comm.rank].clone())


def reduce_scatter_uneven(comm: Any, numel: int, other: bool) -> None:
    parts = parts_of(comm, numel, 1 if other else 0)
    comm.reduce_scatter(parts[comm.rank].clone(), parts)


def all_to_all_counted(comm: Any, numel: int, other: bool) -> None:
    sizes = [numel] * comm.world_size if other else None
    source = torch.ones(numel * comm.world_size)
    comm.all_to_all_single(torch.empty_like(source), source, sizes, sizes)


CALLS: dict[DifferingCall, tuple[str, str]] = {
    all_gather_uneven: ("uneven parts", "uneven parts"),
    reduce_scatter_uneven: ("reduce(SUM", "root=0"),  # it is one reduce for each part
    all_to_all_counted: ("numel=", "split sizes given"),
}


def differ(rank: Rank, call: DifferingCall, numel: int) -> Attempt:
    """Node 1 makes the other call, in a group of its own, as it breaks."""
    group = rank.comm.new_group()
    found = attempt(call, group, numel, rank.rank >= 2)
    group.close()
    return found


def assert_one_desync(found: list[Attempt], call: DifferingCall) -> None:
    """Every rank has the one error, which says what was called on either node, and soon."""
    assert {one.kind for one in found} == {"DesyncError"}, found
    assert len({one.text for one in found}) == 1, found
    for word in (*CALLS[call], "ranks [0]", "ranks [2]"):
        assert word in found[0].text, found[0].text
    slowest = max(one.seconds for one in found)
    assert slowest < LATE_S, f"the error came after {slowest:.2f} s; the goal is {GOAL_S:g} s"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[], Pool]]:
    """Ranks for this file alone, as groups that broke are left behind in them."""
    opened: list[Pool] = []

    def get() -> Pool:
        if not opened or not opened[-1].is_open:
            opened.append(Pool(4, Setup(nodes="aabb")))
        return opened[-1]

    yield get
    for pool in opened:
        pool.close()


@pytest.mark.parametrize("numel", [5, LARGE])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_nodes_that_differ(ranks: Callable[[], Pool], call: DifferingCall, numel: int) -> None:
    assert_one_desync(ranks().run(differ, call, numel), call)
