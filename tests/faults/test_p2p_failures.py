# SPDX-License-Identifier: Apache-2.0
"""Sends and receives that go wrong: cycles, mismatches, peers that leave, die or never come."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.contract.test_p2p import around
from tests.support.harness import LATE_S, Attempt, Pool, Pools, Rank, Setup, attempt


def sends_in_a_cycle(rank: Rank) -> list[Attempt]:
    group = rank.comm.new_group()
    group.barrier()
    right = (rank.rank + 1) % rank.world_size
    attempts = [
        attempt(group.send, torch.ones(100_000), right, timeout_s=0.5),
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


def in_a_chain(rank: Rank, last: str) -> list[Attempt]:
    """Ranks 0 and 1 receive from the next one; rank 2 waits for rank 3, which makes no call."""
    group = rank.hasty_group(2.0)
    attempts = []
    if rank.rank < 2:
        attempts.append(attempt(group.recv, torch.ones(1000), rank.rank + 1))
        rank.tell(f"{last}: rank {rank.rank} failed")
    elif rank.rank == 2 and last == "call":
        attempts.append(attempt(group.barrier, timeout_s=20))
    elif rank.rank == 2:
        attempts.append(attempt(group.send, torch.ones(10_000), 3, timeout_s=20))
    else:
        rank.wait_for(f"{last}: rank 0 failed")
        rank.wait_for(f"{last}: rank 1 failed")
    attempts.append(attempt(group.barrier))
    group.close()
    return attempts


@pytest.mark.parametrize(
    ("last", "words"), [("send", "rank 2, which sends to rank 3"), ("call", "waits in a call")]
)
def test_the_root_of_a_chain_is_named(pools: Pools, last: str, words: str) -> None:
    rows = pools(4).run(in_a_chain, last)
    for one in (one for row in rows for one in row):
        assert one.kind == "CollectiveTimeout", one
        assert one.ranks == (3,), one
        assert "receives from rank" in one.text
        assert words in one.text
        assert one.text == rows[0][0].text
    assert max(one.seconds for row in rows for one in row) < LATE_S


def alone(rank: Rank, way: str) -> list[Attempt]:
    """Rank 1 makes no call; rank 0 waits for it: what it sends does not fit a bay."""
    group = rank.hasty_group(0.8)
    attempts = []
    if rank.rank == 0:
        calls: dict[str, Callable[[], Any]] = {
            "send": lambda: group.send(torch.ones(10_000), 1),
            "recv": lambda: group.recv(torch.ones(1000), 1, 5),
            "any": lambda: group.recv(torch.ones(1000)),
            "isend": lambda: group.isend(torch.ones(10_000), 1).wait(),
        }
        attempts.append(attempt(calls[way]))
        rank.tell(f"{way} failed")
    else:
        rank.wait_for(f"{way} failed")
    attempts.append(attempt(group.barrier))
    group.close()
    return attempts


@pytest.mark.parametrize("way", ["send", "recv", "any", "isend"])
def test_a_peer_that_does_not_come(pools: Pools, way: str) -> None:
    first, second = pools(2).run(alone, way)
    for one in (*first, *second):
        assert one.kind == "CollectiveTimeout", one
        assert one.ranks == (1,)
        assert "FASTCOLL_TIMEOUT_S" in one.text
    assert 0.3 < first[0].seconds < LATE_S
    assert ("send(float32, numel=10000, dst=1" if "send" in way else "recv(") in first[0].text


def mismatch(rank: Rank, numel: int, dtype: str) -> list[Attempt]:
    group = rank.comm.new_group(timeout_s=15)
    if rank.rank == 0:
        attempts = [attempt(group.send, torch.ones(40_000), 1, 2)]
    else:
        tensor = torch.ones(numel, dtype=getattr(torch, dtype))
        attempts = [attempt(group.recv, tensor, 0, 2)]
    attempts.append(attempt(group.barrier))
    group.close()
    return attempts


@pytest.mark.parametrize(("numel", "dtype"), [(39_999, "float32"), (40_000, "int32"), (1, "uint8")])
def test_other_sizes_and_dtypes_are_named(pools: Pools, numel: int, dtype: str) -> None:
    for row in pools(2).run(mismatch, numel, dtype):
        for one in row:
            assert one.kind == "DesyncError", one
            assert "rank 0 sends 40000 x float32 to rank 1" in one.text
            assert f"{numel} x {dtype}" in one.text
            assert one.seconds < LATE_S


def leave_or_die(rank: Rank, how: str) -> Attempt | float:
    """Rank 1 sends a small message and goes; rank 0 receives late, then wants more."""
    if rank.rank == 1:
        rank.comm.send(torch.full((4,), 3.0), 0)
        rank.comm.close()
        if how == "die":
            import os

            os._exit(9)
        return 0.0
    time.sleep(0.3)
    out = torch.empty(4)
    rank.comm.recv(out, 1)
    assert out[3].item() == 3
    return attempt(rank.comm.recv, torch.empty(90_000), 1)


@pytest.mark.parametrize("how", ["leave", "die"])
def test_what_was_sent_before_leaving_arrives(fresh_pool: Callable[..., Pool], how: str) -> None:
    pool = fresh_pool(2)
    pool.start(leave_or_die, how)
    [outcome] = pool.collect(ranks=[0])
    assert outcome.ok, outcome.describe()
    assert outcome.value.kind == "PeerLostError", outcome.value
    assert outcome.value.ranks == (1,)
    assert outcome.value.seconds < LATE_S


def mistakes(rank: Rank) -> list[str]:
    comm, some, wrong = rank.comm, torch.ones(3), []
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "no such rank": (lambda: comm.send(some, 2), "dst=2"),
        "below 0": (lambda: comm.recv(some, -1), "src=-1"),
        "nobody": (lambda: comm.send(some, None), "dst"),
        "tag": (lambda: comm.isend(some, 0, "a"), "tag"),
        "tag below 0": (lambda: comm.irecv(some, 0, -1), "tag"),
        "list": (lambda: comm.send([1.0], 0), "list"),
        "expanded": (lambda: comm.recv(torch.ones(1).expand(3), 0), "expanded"),
        "limit": (lambda: comm.send(some, 0, timeout_s=0), "timeout_s"),
    }
    for name, (call, words) in calls.items():
        one = attempt(call)
        if one.kind != "UsageError" or words not in one.text:
            wrong.append(f"{name}: {one}")
    return wrong


@pytest.mark.parametrize("nodes", ["aa", "ab"])
def test_mistakes_are_refused_and_do_no_harm(pools: Pools, clusters: Pools, nodes: str) -> None:
    pool = pools(2) if nodes == "aa" else clusters(nodes)
    assert pool.run(mistakes) == [[], []]
    assert pool.run(around, "one by one") == [[], []]


def closed_under_a_receive(rank: Rank) -> str:
    group = rank.comm.new_group()
    work = group.irecv(torch.ones(1000), 1 - rank.rank)
    group.barrier()
    group.close()
    kind = attempt(work.wait).kind
    assert type(work.exception()).__name__ == kind
    assert work.is_completed()
    assert not work.is_success()
    return kind


def test_closing_ends_what_is_open(pools: Pools) -> None:
    """On the rank that leaves first; the other one may hear that its peer has left."""
    kinds = pools(2).run(closed_under_a_receive)
    assert set(kinds) <= {"UsageError", "PeerLostError"}
    assert "UsageError" in kinds


def receive_from_one_that_left(rank: Rank, numel: int) -> list[float]:
    """Rank 1 sends and leaves while rank 0 is stopped in its wait for the first message."""
    group = rank.comm.new_group()
    if rank.rank == 1:
        rank.wait_for("stopped")
        works = [group.isend(torch.full((numel,), float(i)), 0) for i in range(3)]
        for work in works:
            work.wait()
        group.close()
        rank.tell("left")
        return []
    rank.tell("waiting")
    got = [torch.empty(numel) for _ in range(3)]
    for tensor in got:
        group.recv(tensor, 1)
        tensor += 10  # it is the program's again
    group.close()
    return [tensor[-1].item() for tensor in got]


def stop_rank_0(pool: Pool, until: str) -> None:
    """Stop rank 0 while it waits, and let it go on when somebody has told."""
    pool.wait_for("waiting")
    time.sleep(0.3)  # it sleeps; what it said is some way before that
    os.kill(pool.pids[0], signal.SIGSTOP)
    pool.tell("stopped")
    pool.wait_for(until)
    os.kill(pool.pids[0], signal.SIGCONT)


@pytest.mark.parametrize("numel", [20, 100])
def test_what_was_received_of_one_that_left_is_received_once(
    fresh_pool: Callable[..., Pool], numel: int
) -> None:
    pool = fresh_pool(2)
    pool.start(receive_from_one_that_left, numel)
    stop_rank_0(pool, until="left")
    assert pool.finish() == [[10.0, 11.0, 12.0], []]


def send_to_one_that_left(rank: Rank) -> Attempt:
    """Rank 1 takes a message out of rank 0's memory and leaves, while rank 0 is stopped."""
    group, tensor = rank.comm, torch.ones(300_001)
    if rank.rank == 1:
        rank.wait_for("stopped")
        found = attempt(group.recv, tensor, 0)
        group.close()
        rank.tell("left")
        return found
    rank.tell("waiting")
    return attempt(group.send, tensor, 1)


def test_what_one_that_left_has_taken_is_sent(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(2, Setup(env={"FASTCOLL_SINGLE_COPY": "always"}))
    pool.start(send_to_one_that_left)
    # It asks who has left before it looks at what was taken.
    stop_rank_0(pool, until="left")
    assert [one.kind for one in pool.finish()] == ["", ""]


def receive_from_one_that_stopped(rank: Rank, waits: bool) -> tuple[bool, float]:
    """Rank 0 sends, and is stopped while it waits for that, or while it does something else."""
    group, tensor = rank.comm, torch.full((300_001,), float(rank.rank + 1))
    if rank.rank == 0:
        work = None if waits else group.isend(tensor, 1)
        rank.tell("waiting")
        if work is None:
            group.send(tensor, 1)
        else:
            rank.wait_for("looked")
            work.wait()
        return True, 1.0
    rank.wait_for("stopped")
    work = group.irecv(tensor, 0)
    end = time.monotonic() + 0.4
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.01)
    is_here = work.is_completed()
    rank.tell("looked")
    work.wait()
    return is_here, tensor.unique().item()


@pytest.mark.parametrize("waits", [True, False])
def test_only_who_waits_for_a_send_helps_with_it(
    fresh_pool: Callable[..., Pool], waits: bool
) -> None:
    """Both copy at the same time then; else the receiver does, out of the sender's memory."""
    pool = fresh_pool(2)
    pool.start(receive_from_one_that_stopped, waits)
    stop_rank_0(pool, until="looked")
    pool.tell("looked")
    (_, sent), (is_here, got) = pool.finish()
    assert sent == got == 1.0
    crowded = len(os.sched_getaffinity(0)) < 2  # then nobody is asked to help
    assert is_here == (not waits or crowded)
