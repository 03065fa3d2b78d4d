# SPDX-License-Identifier: Apache-2.0
"""Sends and receives that go wrong: a cycle of them, and a group that is closed.

Late, lost and stopped peers are those of test_every_fault.py and test_fault_points.py, and wrong
arguments those of test_bad_input.py. The text of each error, and messages of a peer that left,
stand in protocol/native.
"""

import torch

from tests.support.harness import LATE_S, Attempt, Pools, Rank, attempt
from tests.support.sites import Site, of_fastcoll

CYCLE_S = 2.0  # of the first rank's wait: by its end all ranks of a busy machine send


def sends_in_a_cycle(rank: Rank) -> list[Attempt]:
    group = rank.comm.new_group()
    group.barrier()
    right = (rank.rank + 1) % rank.world_size
    attempts = [
        attempt(group.send, torch.ones(100_000), right, timeout_s=CYCLE_S),
        attempt(group.barrier),
    ]
    group.close()
    return attempts


def test_a_cycle_of_blocking_sends_is_shown(pools: Pools) -> None:
    rows = pools(3).run(sends_in_a_cycle)
    for row in rows:
        for one in row:
            assert one.kind == "CollectiveTimeout", one
            for rank in range(3):
                assert f"sends to rank {rank}" in one.text
            assert "cycle" in one.text
        assert row[0].seconds < LATE_S
    assert len({one.text for row in rows for one in row}) == 1


def closed_under_a_receive(rank: Rank) -> str:
    group = rank.comm.new_group()
    work = group.irecv(torch.ones(1000), (rank.rank + rank.world_size // 2) % rank.world_size)
    group.barrier()
    group.close()
    kind = attempt(work.wait).kind
    assert type(work.exception()).__name__ == kind
    assert work.is_completed()
    assert not work.is_success()
    return kind


@of_fastcoll
def test_closing_ends_what_is_open(site: Site) -> None:
    """On the rank that leaves first; others may hear that their peer has left."""
    kinds = site.run(closed_under_a_receive)
    assert set(kinds) <= {"UsageError", "PeerLostError"}
    assert "UsageError" in kinds
