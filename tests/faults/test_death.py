# SPDX-License-Identifier: Apache-2.0
"""A peer that dies: known within a second, by name; a peer that only left is no loss."""

import ctypes
import os
import signal
import tempfile
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.faults.test_fork import in_child
from tests.support.harness import LATE_S, Attempt, Outcome, Pool, Rank, Setup, attempt, come_up

WAITS = {
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(3)),
    "large all_reduce": lambda comm: comm.all_reduce(torch.ones(500_000)),
    "chain": lambda comm: comm.all_reduce(torch.ones(50_000), algorithm="chain"),
    "reduce_scatter": lambda comm: comm.reduce_scatter_tensor(
        torch.ones(4), torch.ones(4 * comm.world_size)
    ),
    "all_gather": lambda comm: comm.all_gather_into_tensor(
        torch.ones(4 * comm.world_size), torch.ones(4)
    ),
    "broadcast": lambda comm: comm.broadcast(torch.ones(3), 2),
    "barrier": lambda comm: comm.barrier(),
    "reduce": lambda comm: comm.reduce(torch.ones(50_000), 0, algorithm="two_shot"),
    "all_to_all": lambda comm: comm.all_to_all_single(
        torch.ones(4 * comm.world_size), torch.ones(4 * comm.world_size)
    ),
    "counted all_to_all": lambda comm: comm.all_to_all(
        [torch.ones(4) for _ in range(comm.world_size)], [torch.ones(4)] * comm.world_size
    ),
    "scatter": lambda comm: comm.scatter(
        torch.ones(3), [torch.ones(3)] * comm.world_size if comm.rank == 2 else None, 2
    ),
    "uneven all_gather": lambda comm: comm.all_gather(
        [torch.ones(rank) for rank in range(comm.world_size)], torch.ones(comm.rank)
    ),
    "asynchronous": lambda comm: comm.all_reduce(torch.ones(3), async_op=True).wait(),
    "empty": lambda comm: comm.empty((4,)),
}


def wait_for_rank_2(rank: Rank, way: str) -> tuple[float, list[Attempt]]:
    """All but rank 2 wait; when the first of them knew, and what every call says afterwards."""
    if rank.rank == 2:
        time.sleep(60)
    attempts = [attempt(WAITS[way], rank.comm)]
    knew = time.monotonic()
    attempts += [attempt(rank.comm.barrier), attempt(rank.comm.all_reduce, torch.ones(2))]
    return knew, attempts


def kill(pool: Pool, rank: int, after_s: float) -> float:
    time.sleep(after_s)
    os.kill(pool.pids[rank], signal.SIGKILL)
    return time.monotonic()


def assert_lost(outcomes: list[Outcome], dead: int, killed: float) -> None:
    for outcome in outcomes:
        if outcome.rank == dead:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        assert outcome.ok, outcome.describe()
        knew, attempts = outcome.value
        assert knew - killed < LATE_S
        for one in attempts:
            assert one.kind == "PeerLostError", one
            assert one.ranks == (dead,)
            assert f"rank {dead}" in one.text
            assert "destroy" in one.text
        assert all(one.seconds < LATE_S for one in attempts[1:])


@pytest.mark.parametrize("way", WAITS)
def test_a_killed_peer(fresh_pool: Callable[..., Pool], way: str) -> None:
    pool = fresh_pool(3)
    pool.start(wait_for_rank_2, way)
    killed = kill(pool, 2, 0.3)
    assert_lost(pool.collect(), 2, killed)


def reduce_until_error(rank: Rank, numel: int, algorithm: str) -> tuple[float, list[Attempt]]:
    tensor = torch.ones(numel, dtype=torch.int32)
    if algorithm == "symmetric":
        tensor, algorithm = rank.comm.empty(numel, dtype=torch.int32).fill_(1), "auto"
    rank.comm.barrier()
    rank.tell("they reduce")
    while True:
        one = attempt(rank.comm.all_reduce, tensor, algorithm=algorithm)
        if one.kind:
            return time.monotonic(), [one, attempt(rank.comm.barrier)]


@pytest.mark.parametrize(
    "algorithm", ["auto", "symmetric", "one_shot", "two_shot", "ring", "chain"]
)
@pytest.mark.parametrize(("world", "dead"), [(2, 0), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_killed_in_the_middle(
    fresh_pool: Callable[..., Pool], algorithm: str, world: int, dead: int
) -> None:
    pool = fresh_pool(world)
    pool.start(reduce_until_error, 700_000, algorithm)
    pool.wait_for("they reduce")
    killed = kill(pool, dead, 0.25)
    assert_lost(pool.collect(), dead, killed)


def test_killed_between_small_calls(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(3)
    pool.start(reduce_until_error, 2, "auto")
    pool.wait_for("they reduce")
    killed = kill(pool, 1, 0.25)
    assert_lost(pool.collect(), 1, killed)


def fork_then_wait(rank: Rank) -> tuple[float, list[Attempt]] | None:
    """Rank 2 leaves a child behind that holds copies of all its sockets."""
    if rank.rank == 2:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        rank.comm.barrier()
        rank.tell("all are there")
        time.sleep(60)
    rank.comm.barrier()
    one = attempt(rank.comm.all_reduce, torch.ones(3))
    return time.monotonic(), [one, attempt(rank.comm.barrier)]


def test_a_dead_peer_with_a_living_child(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(3)
    pool.start(fork_then_wait)
    pool.wait_for("all are there")
    killed = kill(pool, 2, 0.5)
    assert_lost(pool.collect(ranks=(0, 1)), 2, killed)


CLONE_NEWPID = 0x20000000


def lose_an_unseen_process(rank: Rank) -> Attempt:
    come_up(rank)
    rank.comm.barrier()
    assert rank.comm._mesh.pids[0] == 0, "it is visible"
    return attempt(rank.comm.all_reduce, torch.ones(3))


def live_in_containers(rank: Rank) -> Attempt | None:
    """Rank 1 does not see the process of rank 0, as in another container."""
    if rank.rank == 1:
        denied = ctypes.CDLL(None).unshare(CLONE_NEWPID)
        rank.store.set("denied", "yes" if denied else "")
        return None if denied else in_child(lose_an_unseen_process, rank)
    if not rank.store.get("denied") and os.fork() == 0:
        come_up(rank)
        rank.comm.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return None


def test_a_dead_peer_in_another_process_namespace(fresh_pool: Callable[..., Pool]) -> None:
    [_, lost] = fresh_pool(2, Setup(init=False)).run(live_in_containers)
    if lost is None:
        pytest.skip("not run: this process may not make namespaces")
    assert lost.kind == "PeerLostError", lost
    assert lost.ranks == (0,)
    assert lost.seconds < LATE_S
    assert "its process, in another namespace, ended (with" in lost.text


def leave(rank: Rank, way: str) -> list[float]:
    """Rank 1 does its part and goes; rank 0 comes to the same call only afterwards."""
    tensor = torch.full((3,), float(rank.rank + 5))
    if rank.rank == 1:
        rank.comm.broadcast(tensor, 1)
        if way == "close":
            rank.comm.close()
            return []
        os._exit(7)
    time.sleep(0.7)
    rank.comm.broadcast(tensor, 1)
    lost = attempt(rank.comm.barrier)
    assert lost.kind == "PeerLostError", lost
    assert lost.ranks == (1,)
    return tensor.tolist()


@pytest.mark.parametrize("way", ["exit", "close"])
def test_a_peer_that_did_its_part_is_no_loss(fresh_pool: Callable[..., Pool], way: str) -> None:
    first, second = fresh_pool(2).outcomes(leave, way)
    assert first.ok, first.describe()
    assert first.value == [6.0] * 3
    assert second.exit_code == (7 if way == "exit" else None)


def part_quickly(rank: Rank, numel: int, algorithm: str, rounds: int) -> list[str]:
    """Close the group right after the call: some are still copying what others leave behind."""
    errors = []
    for _ in range(rounds):
        group = rank.comm.new_group()
        tensor = torch.full((numel,), float(rank.rank))
        one = attempt(group.all_reduce, tensor, algorithm=algorithm)
        group.close()
        right = bool((tensor == rank.world_size * (rank.world_size - 1) / 2).all())
        errors += [one.text] if one.kind else ([] if right else ["wrong sum"])
    return errors


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "chain"])
def test_leaving_right_after_a_call_is_no_loss(pools: Any, algorithm: str) -> None:
    for numel in (1, 5000, 300_000):
        assert pools(3).run(part_quickly, numel, algorithm, 12) == [[]] * 3


def part_after(rank: Rank, way: str, rounds: int) -> list[str]:
    """Close the group right after a call, whatever it was."""
    errors = []
    for _ in range(rounds):
        group = rank.comm.new_group()
        one = attempt(WAITS[way], group)
        group.close()
        errors += [one.text] if one.kind else []
    return errors


@pytest.mark.parametrize("way", WAITS)
def test_leaving_after_any_call_is_no_loss(pools: Any, way: str) -> None:
    assert pools(4).run(part_after, way, 10) == [[]] * 4


def bring_up(rank: Rank) -> tuple[float, list[Attempt]]:
    import fastcoll

    if rank.rank == 2:
        time.sleep(60)
    options = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 2.0}
    one = attempt(fastcoll.init, store=rank.store, **options)
    return time.monotonic(), [one]


def test_death_before_init_ends_at_the_limit(fresh_pool: Callable[..., Pool]) -> None:
    """Nobody knows yet who the dead rank was: the limit of init bounds the wait."""
    pool = fresh_pool(3, Setup(init=False))
    pool.start(bring_up)
    kill(pool, 2, 0.2)
    for outcome in pool.collect(ranks=(0, 1)):
        _, [one] = outcome.value
        assert one.kind in ("CollectiveTimeout", "PeerLostError")
        assert one.ranks == (2,)
        assert one.seconds <= 2.0 + LATE_S


# What a rank does in init, in this order.
STEPS_OF_INIT = {
    "introduction": "fastcoll.bootstrap.join.describe_rank",
    "exchange": "fastcoll.bootstrap.exchange.StoreExchange.gather",
    "call": "fastcoll.bootstrap.rendezvous._call",
    "greeting": "fastcoll.bootstrap.rendezvous._greet",
    "reply": "fastcoll.bootstrap.rendezvous._read_reply",
    "descriptors": "fastcoll.bootstrap.mesh.Mesh.exchange_fds",
    "barrier": "fastcoll.barrier",
}


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed_in_init(rank: Rank, step: str) -> Attempt:
    import fastcoll

    if rank.rank == 1:
        unittest.mock.patch(STEPS_OF_INIT[step], die).start()
        for peer in (0, 2):  # they have come: at the limit, nobody else is missing
            rank.wait_for(f"fastcoll/world/3/hello/1/{peer}")
    options = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 1.0}
    one = attempt(fastcoll.init, store=rank.store, **options)
    return one if one.kind else attempt(fastcoll.barrier)


@pytest.mark.parametrize("step", STEPS_OF_INIT)
def test_death_in_the_middle_of_init(fresh_pool: Callable[..., Pool], step: str) -> None:
    """Before one of its steps."""
    pool = fresh_pool(3, Setup(init=False))
    first, second, third = pool.outcomes(be_killed_in_init, step)
    assert second.exit_code == -signal.SIGKILL
    for outcome in (first, third):
        one = outcome.value
        assert one.kind in ("CollectiveTimeout", "PeerLostError"), one
        assert one.ranks == (1,), one
        assert one.seconds <= 1.0 + LATE_S


def die_at_the_door(rank: Rank) -> Attempt:
    """Rank 2 has introduced itself for a new group, and dies before it connects to anybody."""
    if rank.rank == 2:
        unittest.mock.patch("fastcoll.bootstrap.rendezvous.Listener.connect", die).start()
    return attempt(rank.comm.new_group)


def test_death_in_new_group_is_seen_by_who_waits_for_a_connection(
    fresh_pool: Callable[..., Pool],
) -> None:
    """Nobody calls at the last rank's door, so nobody hears there that it is gone."""
    *others, last = fresh_pool(3).outcomes(die_at_the_door)
    assert last.exit_code == -signal.SIGKILL
    for outcome in others:
        one = outcome.value
        assert one.kind == "PeerLostError", one
        assert one.ranks == (2,), one
        assert one.seconds < LATE_S, one


@pytest.mark.slow
def test_death_in_new_group_is_seen_on_its_node(fresh_pool: Callable[..., Pool]) -> None:
    """The same where the group is on two nodes, and on the other one."""
    pool = fresh_pool(3, Setup(nodes="baa"))
    *others, last = pool.outcomes(die_at_the_door)
    assert last.exit_code == -signal.SIGKILL
    for one in (outcome.value for outcome in others):
        assert one.kind == "PeerLostError", one
        assert one.ranks == (2,), one
        assert one.seconds < LATE_S, one


def give_up_on_rank_1(rank: Rank, quitter: int, step: str, slow: int) -> Attempt:
    """One rank finds that rank 1 is lost, at some step of init; another one comes late."""
    import fastcoll
    from fastcoll.bootstrap import mesh, rendezvous

    if rank.rank == quitter:
        where, name = {
            "greet": (rendezvous, "_greet"),
            "reply": (rendezvous, "_read_reply"),
            "send": (mesh.Mesh, "_send"),
            "receive": (mesh.Mesh, "_ready"),
        }[step]
        function = getattr(where, name)

        def give_up(*_: Any) -> None:
            setattr(where, name, function)
            time.sleep(0.2)
            raise fastcoll.PeerLostError("rank 1 hung up", [1])

        setattr(where, name, give_up)
    call = rendezvous._call

    def call_late(*args: Any) -> Any:
        time.sleep(0.5)
        return call(*args)

    if rank.rank == slow:
        rendezvous._call = call_late
    options = {"rank": rank.rank, "world_size": rank.world_size, "timeout_s": 12.0}
    one = attempt(fastcoll.init, store=rank.store, **options)
    return one if one.kind else attempt(fastcoll.barrier)


@pytest.mark.parametrize(
    ("quitter", "step", "slow"),
    [
        (0, "greet", 2),
        (0, "greet", -1),
        pytest.param(2, "greet", -1, marks=pytest.mark.slow),  # rank 1 waits to its limit
        (2, "reply", -1),
        (0, "send", -1),
        (0, "receive", -1),
        (2, "receive", -1),
    ],
)
def test_who_gives_up_in_init_says_why(
    fresh_pool: Callable[..., Pool], quitter: int, step: str, slow: int
) -> None:
    """A rank that leaves because of another one is not taken for the culprit."""
    pool = fresh_pool(3, Setup(init=False))
    for outcome in pool.outcomes(give_up_on_rank_1, quitter, step, slow):
        assert outcome.ok, outcome.describe()
        if outcome.rank != 1:
            assert outcome.value.kind == "PeerLostError", outcome.value
            assert outcome.value.ranks == (1,), outcome.value
            assert outcome.value.seconds < LATE_S


def survive(rank: Rank) -> Any:
    """After the loss: destroy, and a new group of those who are left."""
    import fastcoll

    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = attempt(rank.comm.all_reduce, torch.ones(2))
    fastcoll.destroy()
    store = torch.distributed.PrefixStore("again", rank.store)
    fastcoll.init(store=store, rank=rank.rank // 2, world_size=2, timeout_s=10)
    tensor = torch.ones(2)
    fastcoll.all_reduce(tensor)
    return lost.kind, tensor.tolist()


def test_the_survivors_make_a_new_group(fresh_pool: Callable[..., Pool]) -> None:
    first, second, third = fresh_pool(3).outcomes(survive)
    assert second.exit_code == -signal.SIGKILL
    assert first.value == third.value == ("PeerLostError", [2.0, 2.0])


def lose_a_child(rank: Rank, way: str) -> tuple[int, Attempt]:
    """Rank 1 is a child of rank 0, which has not asked for its status yet."""
    import fastcoll

    folder = tempfile.TemporaryDirectory()
    child = os.fork()
    store = torch.distributed.FileStore(f"{folder.name}/store", 2)
    comm = fastcoll.init(store=store, rank=int(child == 0), world_size=2, timeout_s=10)
    comm.barrier()
    if child == 0:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif way == "closed":
            comm.close()
            time.sleep(1)
        os._exit(7)
    one = attempt(comm.all_reduce, torch.ones(3))
    os.waitpid(child, 0)
    fastcoll.destroy()
    folder.cleanup()
    return child, one


@pytest.mark.parametrize(
    ("way", "fate"),
    [
        ("killed", "was killed by signal 9 (Killed)"),
        ("exited", "exited with status 7"),
        ("closed", "left the group; its process lives"),
    ],
)
def test_the_exit_status_is_told(fresh_pool: Callable[..., Pool], way: str, fate: str) -> None:
    [(child, one)] = fresh_pool(1, Setup(init=False)).run(lose_a_child, way)
    assert one.kind == "PeerLostError"
    assert f"process {child} {fate}; it had entered barrier() #1, not #2" in one.text
