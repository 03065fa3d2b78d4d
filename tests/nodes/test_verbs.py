# SPDX-License-Identifier: Apache-2.0
"""Calls that only several nodes have: segments, carriers' sums, subgroups, counted parts.

The verbs themselves stand in contract/test_values.py. Maps: two equal nodes, 3 + 1, interleaved
numbers, one rank a node, and three nodes of two sizes that divide neither.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.support import oracle
from tests.support.calls import MOVES, ROOTED, Call, expected
from tests.support.harness import TIMEOUT_S, Pool, Rank, Setup
from tests.support.perform import compare, perform_all
from tests.support.sites import across, ranks_by_node

Clusters = Callable[[str], Pool]
SLOW = pytest.mark.slow
MAPS = (
    "aabb",
    "aaab",
    *(pytest.param(nodes, marks=SLOW) for nodes in ("abab", "abc", "aaabbc")),
)
LARGE_SIZE = 700_001  # several segments, and no lane's chunk is whole


def in_segments() -> list[Call]:
    """Calls of several segments."""
    calls = [
        Call(verb, dtype, LARGE_SIZE, "SUM", numerics="same_bits")
        for verb in ("all_reduce", "reduce_scatter")
        for dtype in ("float32", "bfloat16")
    ]
    return calls + [
        Call(verb, "float32", LARGE_SIZE, root=1 if verb in ROOTED else 0) for verb in MOVES
    ]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["aabb", "aaabbc"])
def test_messages_of_several_segments(clusters: Clusters, nodes: str) -> None:
    across(nodes).on(clusters(nodes)).check(in_segments())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("nodes", ["aabb", pytest.param("abc", marks=SLOW)])
def test_half_types_are_fast_within_their_bound(clusters: Clusters, nodes: str, dtype: str) -> None:
    """The bound is the one that HierarchicalCommunicator states; the bits differ somewhere."""
    form, world, num_nodes = oracle.FLOATS[dtype], len(nodes), len(set(nodes))
    call = Call("all_reduce", dtype, 50_000, numerics=None, seed=3)
    results = clusters(nodes).run(perform_plain, dtype, call.numel)
    inputs = np.array([plain(dtype, call.numel, rank) for rank in range(world)])
    exact, scale = inputs.astype(np.float64).sum(0), np.abs(inputs).astype(np.float64).sum(0)
    bound = (num_nodes + 1) * 2.0 ** -(form.mantissa_bits + 1) * scale
    for result in results:
        assert (np.abs(result - exact) <= bound).all()
        assert (result == results[0]).all()
    once = torch.tensor(exact).to(getattr(torch, dtype)).double().numpy()
    assert (results[0] != once).any(), "the carrier did not reduce"


def plain(dtype: str, numel: int, rank: int) -> np.ndarray:
    numbers = np.random.default_rng(rank).standard_normal(numel)
    return torch.tensor(numbers).to(getattr(torch, dtype)).double().numpy()


def perform_plain(rank: Rank, dtype: str, numel: int) -> np.ndarray:
    tensor = torch.tensor(plain(dtype, numel, rank.rank)).to(getattr(torch, dtype))
    rank.comm.all_reduce(tensor)
    return tensor.double().numpy()


def perform_in_fast_group(rank: Rank, calls: list[Call]) -> list[Any]:
    """Make calls in a group whose own promise is less; also what its node was asked for."""
    with rank.comm.new_group(numerics="fast") as group:
        issue, asked = group._node_group.issue, []

        def note(call: Any) -> Any:
            asked.append(getattr(call, "numerics", None))
            return issue(call)

        group._node_group.issue = note
        found = perform_all(dataclasses.replace(rank, comm=group), calls)
    assert "fast" not in asked
    assert rank.rank == 3 or "same_bits" in asked  # it is alone on its node
    return found


def test_a_call_may_ask_a_fast_group_for_the_same_bits(clusters: Clusters) -> None:
    pool, nodes = clusters("aaab"), ranks_by_node("aaab")
    calls = [
        Call(verb, "float32", numel, "SUM", numerics="same_bits", seed=numel)
        for verb in ("all_reduce", "reduce_scatter", "reduce")
        for numel in (1001, LARGE_SIZE)
    ]
    pool.start(perform_in_fast_group, calls)
    wants = [expected(call, 4, nodes) for call in calls]
    assert compare(calls, wants, pool.finish()) == []


def check_uneven(comm: Any) -> None:
    """Lists and split sizes, whose parts differ from rank to rank."""
    me, world = comm.rank, comm.world_size
    for scale in (1, 3000):
        outs = [torch.zeros(scale * (peer + 1)) for peer in range(world)]
        comm.all_gather(outs, torch.full((scale * (me + 1),), float(me)))
        assert all((out == peer).all() for peer, out in enumerate(outs))
        sizes = [[scale * ((src + 2 * dst) % 3) for dst in range(world)] for src in range(world)]
        source = torch.cat(
            [torch.full((size,), 10.0 * me + dst) for dst, size in enumerate(sizes[me])]
        )
        expected = [row[me] for row in sizes]
        target = torch.zeros(sum(expected))
        comm.all_to_all_single(target, source, expected, sizes[me])
        want = [torch.full((size,), 10.0 * src + me) for src, size in enumerate(expected)]
        assert torch.equal(target, torch.cat(want))


def uneven(rank: Rank) -> None:
    check_uneven(rank.comm)
    me, world = rank.rank, rank.world_size
    parts = [torch.full((peer + 1,), float(me)) for peer in range(world)]
    mine = torch.zeros(me + 1)
    rank.comm.reduce_scatter(mine, parts)
    assert (mine == sum(range(world))).all()


@pytest.mark.parametrize("nodes", MAPS)
def test_uneven_parts(clusters: Clusters, nodes: str) -> None:
    clusters(nodes).run(uneven)


def others(rank: Rank) -> None:
    """A barrier, objects, lists, asynchronous calls in order."""
    import fastcoll

    me, world, comm = rank.rank, rank.world_size, rank.comm
    comm.barrier()
    objects = [None] * world
    comm.all_gather_object(objects, {"rank": me, "text": "x" * 3000 * me})
    assert [one["rank"] for one in objects] == list(range(world))
    tensors = [torch.full((size,), 1.0) for size in (1, 5000, 10)]
    listed = [
        torch.full((size,), me, dtype=dtype)
        for size in (3, 4000)
        for dtype in (torch.int32, torch.float64)
    ]
    fastcoll.all_reduce_coalesced(listed, group=comm)
    assert all((tensor == sum(range(world))).all() for tensor in listed)
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    comm.barrier()  # behind them
    assert all(work.is_completed() for work in works)
    assert all((tensor == world).all() for tensor in tensors)


def counted(comm: Any, size: int, base: int, *, as_list: bool, async_op: bool) -> tuple[Any, Any]:
    """Start an all_to_all of parts of unequal size; return its Work and a check of its result."""
    me, world = comm.rank, comm.world_size
    sizes = [[size * ((src + 2 * dst) % 3) for dst in range(world)] for src in range(world)]
    given = [torch.full((count,), base + 10.0 * me + dst) for dst, count in enumerate(sizes[me])]
    got = [torch.zeros(row[me]) for row in sizes]
    if as_list:
        work = comm.all_to_all(got, given, async_op=async_op)
    else:
        whole, splits = torch.zeros(sum(row[me] for row in sizes)), [row[me] for row in sizes]
        work = comm.all_to_all_single(whole, torch.cat(given), splits, sizes[me], async_op=async_op)
        got = list(whole.split(splits))
    return work, lambda: all((one == base + 10.0 * src + me).all() for src, one in enumerate(got))


def counted_in_the_queue(rank: Rank, as_list: bool) -> None:
    comm = rank.comm
    for size in (1, 30_000):
        started = [
            counted(comm, size, base, as_list=as_list, async_op=base < 200)
            for base in (0, 100, 200)  # the last one waits behind those before it
        ]
        for work, is_right in started:
            assert work is None or work.wait(TIMEOUT_S)
            assert is_right()


@pytest.mark.parametrize("as_list", [False, True], ids=["split sizes", "lists"])
def test_parts_that_are_counted_in_asynchronous_calls(
    fresh_pool: Callable[[int, Setup], Pool], as_list: bool
) -> None:
    """Their sizes are told within the call: behind it they would wait for it for ever."""
    fresh_pool(4, Setup(nodes="aabb")).run(counted_in_the_queue, as_list)


def test_barriers_objects_lists_and_asynchronous_calls(clusters: Clusters) -> None:
    clusters("aabb").run(others)


def list_of_two_dtypes(rank: Rank) -> list[bool]:
    """Whether each result of a call on a list is the tensor that stands there in the list."""
    tensors = [torch.ones(2), torch.ones(2, dtype=torch.int32), torch.ones(3)]
    work = rank.comm.all_reduce_coalesced(tensors, async_op=True)
    return [one is tensor for one, tensor in zip(work.result(), tensors, strict=True)]


def test_results_have_the_order_of_their_list(clusters: Clusters) -> None:
    assert clusters("ab").run(list_of_two_dtypes) == [[True] * 3] * 2


def subgroups(rank: Rank) -> list[str]:
    """Groups inside a node, across and mixed, and a group of a group."""
    kinds = []
    for ranks in ([0, 1], [0, 2], [0, 1, 2], [3, 1]):
        group = rank.comm.new_group(ranks)
        if group is None:
            continue
        tensor = torch.full((60_000,), float(rank.rank))
        group.all_reduce(tensor)
        assert (tensor == sum(ranks)).all()
        kinds.append(type(group).__name__)
        if ranks == [0, 1, 2]:
            inner = group.new_group([0, 1])
            assert inner is None or inner.world_size == 2
        group.close()
    return kinds


def test_subgroups_get_what_their_map_needs(clusters: Clusters) -> None:
    one, many = "Communicator", "HierarchicalCommunicator"
    found = clusters("aabb").run(subgroups)
    assert found == [[one, many, many], [one, many, many], [many, many], [many]]


def connections_to(port: int) -> int:
    mine = psutil.Process().net_connections("tcp")
    return sum(bool(one.raddr) and one.raddr.port == port for one in mine)


def more_groups(rank: Rank) -> tuple[int, int]:
    """How many connections to the store groups over nodes make; and one that makes its own."""
    store = rank.store.underlying_store
    before = connections_to(store.port)
    groups = [rank.comm.new_group() for _ in range(3)]
    several = connections_to(store.port) - before
    another = store.clone()
    control = connections_to(store.port) - before - several
    del another
    for group in groups:
        group.close()
    return several, control


def test_groups_over_nodes_share_a_connection_to_the_store(clusters: Clusters) -> None:
    assert clusters("aabb").run(more_groups) == [(0, 1)] * 4
