# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors over several nodes, with the CPU in the GPUs' place (tests/support/fake_nodes.py).

The verbs stand in contract/test_values.py and test_gpu_parts.py. The work of NCCL and streams is
for tests/gpu/test_nodes.py.
"""

import dataclasses
import itertools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.errors import UnsupportedError
from fastcoll.group.communicator import Communicator
from fastcoll.nodes import reductions
from fastcoll.nodes.gpus import group as node_gpus
from fastcoll.nodes.gpus.in_flight import CallsInFlight
from fastcoll.nodes.lanes import Lanes
from fastcoll.types import Numerics
from tests.nodes.test_verbs import in_segments
from tests.support.calls import Call, Place, expected
from tests.support.gpu import needs_gpu_part
from tests.support.harness import LATE_S, TIMEOUT_S, Attempt, Pool, Rank, Setup, attempt
from tests.support.perform import Result, compare, perform_all
from tests.support.sites import across_gpus, group_on_fake_node_gpus, ranks_by_node

pytestmark = needs_gpu_part
Clusters = Callable[[str], Pool]
FreshPool = Callable[..., Pool]


def on_gpus(
    rank: Rank, calls: list[Call], plant: Callable[[], Any] = lambda: None
) -> tuple[list[Result], list[list[str]], list[Any]]:
    """Make calls on made-up GPUs; what lanes and kernels were asked for, too."""
    with group_on_fake_node_gpus(rank) as (comm, fake):
        plant()
        results = perform_all(dataclasses.replace(rank, comm=comm), calls)
    return results, [lane.transfers for lane in fake.lanes], fake.core.log


def wrong(pool: Pool, nodes: str, calls: list[Call], *plant: Any) -> list[str]:
    pool.start(on_gpus, calls, *plant)
    wants = [expected(call, len(nodes), ranks_by_node(nodes)) for call in calls]
    return compare(calls, wants, [results for results, _, _ in pool.finish()])


@pytest.mark.parametrize("nodes", ["aabb", pytest.param("aaab", marks=pytest.mark.slow)])
def test_messages_of_several_segments(clusters: Clusters, nodes: str) -> None:
    across_gpus(nodes).on(clusters(nodes)).check(in_segments())


def test_transfers_run_while_the_node_works(clusters: Clusters) -> None:
    """Several transfers are under way before a stream waits for the first one."""
    from tests.support.fake_nodes import SEGMENT_BYTES  # only now: builds without a GPU part cannot

    numel = 5 * SEGMENT_BYTES // 4  # five segments, of which four go on at once
    pool = clusters("aabb")
    rows = pool.run(on_gpus, [Call("all_reduce", "int32", numel, places=(Place(in_place=True),))])
    for _, [transfers], kernels in rows:
        assert transfers == ["start all_to_all"] * 4 + [
            "wait all_to_all", "start all_to_all", *["wait all_to_all"] * 4, "abort"
        ]  # fmt: skip
        verbs = [verb for verb, *_ in kernels if verb in ("reduce_scatter", "all_gather")]
        assert verbs[-10:] == ["reduce_scatter"] * 4 + [
            "all_gather", "reduce_scatter", *["all_gather"] * 4
        ]  # fmt: skip


# ---- what the made-up GPUs must notice -----------------------------------------------------------


def nobody_waits() -> None:
    """Streams do not wait for transfers."""
    CallsInFlight.wait = lambda self, *_: None  # type: ignore[method-assign]


def nobody_waits_once() -> None:
    """Streams do not wait for one of the transfers."""
    right, count = CallsInFlight.wait, itertools.count()

    def wait(self: Any, *args: Any) -> None:
        if next(count) != 1:
            right(self, *args)

    CallsInFlight.wait = wait  # type: ignore[method-assign]


def wrong_order() -> None:
    """Nodes are added last to first."""
    right = node_gpus.GpuReduction.reduce
    node_gpus.GpuReduction.reduce = lambda self, target, rows: right(self, target, rows[::-1])  # type: ignore[method-assign]


def rounds_early() -> None:
    """The sums of nodes are rounded before they are added."""
    reductions.partial_dtype = lambda dtype, op: dtype  # type: ignore[assignment]


def writes_early() -> None:
    """A transfer's chunk is overwritten before it has left."""
    right = Lanes.exchange

    def exchange(self: Any, slot: int, given: Any, expected: Any) -> Any:
        found = right(self, slot, given, expected)
        for one in given:
            if self._carriers[0].__class__.__name__ == "NcclCarrier" and one is not None:
                one.zero_()
        return found

    Lanes.exchange = exchange  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "plant", [nobody_waits, nobody_waits_once, wrong_order, rounds_early, writes_early]
)
def test_a_planted_mistake_is_seen(fresh_pool: FreshPool, plant: Callable[[], None]) -> None:
    """Negative controls."""
    calls = [
        Call("all_reduce", dtype, 4099, numerics="same_bits", seed=3)
        for dtype in ("float32", "bfloat16")
    ]
    # Two nodes can be added in either order; to three a transfer takes a copy.
    nodes = "aabb" if plant is writes_early else "abca"
    pool = fresh_pool(4, Setup(nodes=nodes))
    if plant is writes_early:
        outcomes = pool.outcomes(on_gpus, calls, plant)
        assert any("was changed under way" in outcome.trace for outcome in outcomes)
    else:
        assert wrong(pool, nodes, calls, plant)


# ---- other calls ---------------------------------------------------------------------------------


def others(rank: Rank) -> None:
    """Lists, asynchronous calls, rounding carriers, calls in a capture."""
    me, world = rank.rank, rank.world_size
    with group_on_fake_node_gpus(rank) as (comm, fake):
        listed = [torch.full((size,), me, dtype=torch.int32) for size in (3, 4000)]
        fastcoll.all_reduce_coalesced(listed, group=comm)
        assert all((tensor == sum(range(world))).all() for tensor in listed)
        tensor = torch.ones(5000, dtype=torch.bfloat16)
        work = comm.all_reduce(tensor, async_op=True)
        work.wait()
        assert (tensor == world).all()
        assert work.is_completed()
        assert fake.lanes[0].transfers[-2:] == ["start all_reduce", "wait all_reduce"]  # it rounds
        fake.is_capturing = True
        tensor = torch.ones(70_000)
        comm.all_reduce(tensor)
        assert (tensor == world).all()
        assert not comm._gpus._in_flight._current.transfers, "what a capture has never runs"
        split = attempt(
            comm.all_to_all_single, torch.zeros(world), torch.zeros(world), [1] * world, [1] * world
        )
        assert (split.kind, "can't be captured" in split.text) == ("UsageError", True)
        comm.check()


@pytest.mark.parametrize("nodes", ["aabb", "aaab"])
def test_other_calls(clusters: Clusters, nodes: str) -> None:
    clusters(nodes).run(others)


def sum_in_a_group_of_torch(rank: Rank, default: Numerics) -> list[str]:
    """Sum float32 without `numerics=`; return what the carrier between the nodes did."""
    from tests.support.fake_nodes import fake_node_gpus

    store = dist.PrefixStore(f"a group that is {default}", rank.store)
    group = Communicator.from_store(store, rank.rank, rank.world_size, default_on_gpus=default)
    with group, fake_node_gpus(group) as fake:
        tensor = torch.full((70_000,), rank.rank + 1.0)
        group.all_reduce(tensor)
        assert (tensor == 10.0).all()
        done: list[str] = fake.lanes[0].transfers
        return done


def test_nccl_adds_by_default_where_the_default_is_fast(clusters: Clusters) -> None:
    pool = clusters("aabb")
    for done in pool.run(sum_in_a_group_of_torch, "fast"):
        assert "start all_reduce" in done, done
    for done in pool.run(sum_in_a_group_of_torch, "same_bits"):
        assert done
        assert "start all_reduce" not in done, done


# ---- mistakes and losses -------------------------------------------------------------------------


def too_many(*size: int, **options: Any) -> Any:
    raise UnsupportedError("too many ranks on this GPU")


def mistakes(rank: Rank) -> list[Attempt]:
    from tests.support.fake_nodes import facts

    def without(**facts_of_rank_2: str) -> Any:
        return lambda device: facts(device) | (facts_of_rank_2 if rank.rank == 2 else {})

    found = []
    for about in (without(problem="no CUDA device"), without(nccl=""), without(nccl="2.27.5")):
        with group_on_fake_node_gpus(rank, about) as (comm, _):
            found.append(attempt(comm.all_reduce, torch.ones(3)))
    with group_on_fake_node_gpus(rank) as (comm, _):
        if rank.rank >= 2:
            comm._node_group.empty = too_many  # type: ignore[method-assign]
        found.append(attempt(comm.all_reduce, torch.ones(3)))
    with group_on_fake_node_gpus(rank) as (comm, fake):
        fake.is_capturing = True
        found.append(attempt(comm.all_reduce, torch.ones(3)))
        found.append(attempt(comm.send, torch.ones(3), (rank.rank + 2) % 4))
    return found


def test_mistakes_are_refused_on_all_ranks_alike(clusters: Clusters) -> None:
    wanted = [
        ("UnsupportedError", "rank 2 can't use its GPU: no CUDA device"),
        ("UnsupportedError", "torch has no NCCL on rank 2"),
        ("UnsupportedError", "the ranks have different versions of it"),
        ("UnsupportedError", "rank 2 can't use its GPU: too many ranks on this GPU"),
        ("UsageError", "make one call before the capture"),
        ("UnsupportedError", "so they can't be captured"),
    ]
    for found in clusters("aabb").run(mistakes):
        for one, (kind, text) in zip(found, wanted, strict=True):
            assert (one.kind, text in one.text) == (kind, True), one.text


def checked_until_broken(comm: Any) -> Attempt:
    """Return what `check` finds; the host does nothing else."""
    start = time.monotonic()
    while not (found := attempt(comm.check)).kind:
        assert time.monotonic() - start < TIMEOUT_S, "nothing was found"
        time.sleep(0.005)
    return dataclasses.replace(found, seconds=time.monotonic() - start)


def differ(rank: Rank, on_node_1: str) -> tuple[Attempt, Attempt]:
    """The nodes call something that is the same to NCCL, or one of them calls on CPUs."""
    tensor = torch.ones(70_000)
    with group_on_fake_node_gpus(rank, is_stuck=on_node_1 == "CPUs") as (comm, _):
        comm.all_reduce(tensor)
        if rank.rank < 2:
            found = attempt(comm.all_reduce, tensor)
        elif on_node_1 == "MAX":
            found = attempt(comm.all_reduce, tensor, fastcoll.ReduceOp.MAX)
        else:
            found = attempt(comm.all_reduce, tensor.numpy())
        if not found.kind:  # the others were not known yet
            found = checked_until_broken(comm)
        return found, attempt(comm.all_reduce, tensor)


@pytest.mark.parametrize("on_node_1", ["MAX", "CPUs"])
def test_nodes_that_differ_are_told_so(fresh_pool: FreshPool, on_node_1: str) -> None:
    for found, again in fresh_pool(4, Setup(nodes="aabb")).run(differ, on_node_1):
        assert found.kind == again.kind == "DesyncError", found.text
        assert found.seconds < LATE_S
        assert (
            "called all_reduce(SUM, float32, numel=70000, numerics=same_bits, on GPUs)"
            in found.text
        )
        if on_node_1 == "MAX":
            # Two lanes find it: ranks 0 and 2, ranks 1 and 3.
            assert re.search("op differs: SUM on rank [01], MAX on rank [23]", found.text)


LIMIT_S = 2.0


def late(rank: Rank) -> tuple[Attempt, list[str], int]:
    """Node 1 does not come: the streams of node 0 would wait for ever."""
    from tests.support.fake_nodes import fake_node_gpus

    comm = rank.hasty_group(LIMIT_S)
    with fake_node_gpus(comm, is_stuck=True) as fake:
        if rank.rank >= 2:
            comm.all_reduce(torch.ones(0))  # all come to their GPUs
            rank.wait_for("broken 0")
            rank.wait_for("broken 1")
            comm.all_reduce(torch.ones(70_000))
            found = checked_until_broken(comm)
        else:
            comm.all_reduce(torch.ones(0))
            comm.all_reduce(torch.ones(70_000))  # the host does not wait: this transfer never ends
            found = checked_until_broken(comm)
            rank.tell(f"broken {rank.rank}")
        # The other rank's verdict may be here before this one's thread has looked.
        end_s = time.monotonic() + LATE_S
        while "abort" not in fake.lanes[0].transfers and time.monotonic() < end_s:
            time.sleep(0.01)
        transfers = list(fake.lanes[0].transfers)
    comm.close()
    return found, transfers, sum(one.name == "fastcoll-in-flight" for one in threading.enumerate())


def test_a_late_node_is_named_at_the_limit(fresh_pool: FreshPool) -> None:
    for found, transfers, num_threads in fresh_pool(4, Setup(nodes="aabb")).run(late):
        assert found.kind == "CollectiveTimeout", found.text
        assert found.ranks == (2, 3)
        assert f"waited {LIMIT_S:g} s for node 1" in found.text
        assert found.seconds < LIMIT_S + LATE_S
        assert "abort" in transfers, "what ran was not ended"
        assert num_threads == 0
