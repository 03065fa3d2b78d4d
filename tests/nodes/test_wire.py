# SPDX-License-Identifier: Apache-2.0
"""Elements that are coded between nodes: the oracle's bits on all ranks, and what a mistake tells.

The oracle itself is within the stated bound (tests/unit/test_wire_oracle.py).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fastcoll.calls.tensors import Call
from fastcoll.types import Verb
from tests.support import oracle, wire_oracle
from tests.support.harness import Attempt, Pool, Rank, attempt
from tests.support.sites import ranks_by_node
from tests.support.wire_oracle import WIRES

Clusters = Callable[[str], Pool]
SLOW = pytest.mark.slow
MAPS = ["aabb", "abc", pytest.param("aaaabbbcddee", marks=SLOW), pytest.param("aab", marks=SLOW)]
DTYPES = ("float32", "float16", "bfloat16")
# Around a block; beyond a packet: whole chunks, shards; several segments.
SMALL = (0, 1, 127, 128, 129, 1000)
LARGE = (65_536, 65_537, 150_001, 500_003)
# Of a reduce_scatter a message is one rank's part, and a segment has all ranks' parts.
SEGMENTS = {"all_reduce": 2_500_001, "reduce_scatter_tensor": 800_001}
PERIOD = 100_003  # prime, so that no block is another one again


@functools.cache
def period_of(rank: int, dtype: str, seed: int) -> oracle.Bits:
    """Elements of many sizes, some blocks of zeros."""
    rng = np.random.default_rng([rank, seed])
    values = rng.standard_normal(PERIOD) * np.exp2(rng.integers(-12, 4, PERIOD))
    values[300:600] = 0
    return oracle.encode(values.astype(np.float32), dtype)


def bits_of(rank: int, dtype: str, numel: int, seed: int, odd: str = "") -> oracle.Bits:
    """A rank's elements; perhaps one that is not finite."""
    bits = np.resize(period_of(rank, dtype, seed), numel)
    if odd and numel > 200 and rank == 1:
        bits[numel // 2] = oracle.encode(np.array([odd], np.float32), dtype)[0]
    return bits


def tensor_of(bits: oracle.Bits, dtype: str) -> torch.Tensor:
    signed = bits.view(np.dtype(f"i{bits.itemsize}")).copy()
    return torch.from_numpy(signed).view(getattr(torch, dtype))


def raw(tensor: torch.Tensor, dtype: str) -> oracle.Bits:
    word = oracle.word_of(dtype)
    return tensor.view(getattr(torch, f"int{8 * word.itemsize}")).numpy().view(word)


def make_calls(rank: Rank, calls: Sequence[tuple[Any, ...]]) -> list[oracle.Bits]:
    results = []
    for verb, dtype, op, wire, numel, odd in calls:
        count = numel * rank.world_size if verb == "reduce_scatter_tensor" else numel
        tensor = tensor_of(bits_of(rank.rank, dtype, count, 5, odd), dtype)
        if verb == "reduce_scatter_tensor":
            output = tensor.new_empty(numel)
            rank.comm.reduce_scatter_tensor(output, tensor, op, wire=wire)
            results.append(raw(output, dtype))
        elif verb == "all_reduce_coalesced":
            other = tensor.clone()
            rank.comm.all_reduce_coalesced([tensor, other], op, wire=wire)
            assert torch.equal(other.view(torch.uint8), tensor.view(torch.uint8))
            results.append(raw(tensor, dtype))
        else:
            rank.comm.all_reduce(tensor, op, wire=wire)
            results.append(raw(tensor, dtype))
    return results


def wanted(call: tuple[Any, ...], nodes: str) -> list[oracle.Bits]:
    """By rank."""
    verb, dtype, op, wire, numel, odd = call
    world, places = len(nodes), ranks_by_node(nodes) or [[*range(len(nodes))]]
    count = numel * world if verb == "reduce_scatter_tensor" else numel
    arrays = [bits_of(rank, dtype, count, 5, odd) for rank in range(world)]
    name = "AVG" if op == "avg" else "SUM"
    if verb == "reduce_scatter_tensor":
        return wire_oracle.reduce_scatter(arrays, dtype, name, places, wire)
    return [wire_oracle.all_reduce(arrays, dtype, name, places, wire)] * world


def check(pool: Pool, nodes: str, calls: Sequence[tuple[Any, ...]]) -> None:
    rows = pool.run(make_calls, calls)
    for place, call in enumerate(calls):
        for rank, want in enumerate(wanted(call, nodes)):
            found = rows[rank][place]
            wrong = np.flatnonzero(found != want)
            assert wrong.size == 0, f"{call} on rank {rank} of {nodes}: {wrong[:5]} differ"


def calls_of(sizes: Sequence[int], verbs: Sequence[str], odd: str = "") -> Iterator[tuple]:
    for number, numel in enumerate(sizes):
        for verb in verbs:
            for place, wire in enumerate(WIRES):
                dtype = DTYPES[0 if wire == "bf16" else (number + place) % 3]
                op = "avg" if (number + place) % 2 else "sum"
                yield verb, dtype, op, wire, numel, odd


VERBS = ("all_reduce", "reduce_scatter_tensor")


@pytest.mark.long
@pytest.mark.parametrize("nodes", MAPS)
def test_all_ranks_have_the_oracles_bits(clusters: Clusters, nodes: str) -> None:
    """W1. On more than two nodes, chunks go whole up to 64 KiB, and in shards beyond."""
    calls = [*calls_of(SMALL, VERBS), *calls_of(LARGE, VERBS)]
    calls += calls_of((1000, 65_537), ["all_reduce_coalesced"])
    check(clusters(nodes), nodes, calls)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["aabb", "aabbc"])
def test_messages_of_several_segments(clusters: Clusters, nodes: str) -> None:
    calls = [call for verb, numel in SEGMENTS.items() for call in calls_of([numel], [verb])]
    check(clusters(nodes), nodes, calls)


@pytest.mark.long
@pytest.mark.parametrize("odd", ["nan", "inf", "-inf"])
def test_what_is_not_finite_is_not_lost(clusters: Clusters, odd: str) -> None:
    """W3. A block with such an element is NaN on every rank, and no other block is."""
    calls = [*calls_of((1000, 65_537), VERBS, odd)]
    check(clusters("aabb"), "aabb", calls)
    for call in calls:
        results = wanted(call, "aabb")
        whole = np.concatenate(results) if call[0] == "reduce_scatter_tensor" else results[0]
        numbers = oracle.decode(whole, call[1])
        assert 0 < np.count_nonzero(~np.isfinite(numbers)) <= wire_oracle.BLOCK


def on_one_node(rank: Rank) -> list[bool]:
    """With and without `wire`, where there is no other node; also the group's C++ path."""
    same = []
    for wire in WIRES:
        for numel in (3, 1000, 100_000):
            plain = torch.randn(numel, generator=torch.Generator().manual_seed(rank.rank))
            coded = plain.clone()
            for _ in range(2):
                rank.comm.all_reduce(plain, "avg")
                rank.comm.all_reduce(coded, "avg", wire=wire)
            parts = [torch.empty(numel), torch.empty(numel)]
            whole = plain.repeat(rank.world_size)
            rank.comm.reduce_scatter_tensor(parts[0], whole)
            rank.comm.reduce_scatter_tensor(parts[1], whole, wire=wire)
            same += [torch.equal(plain, coded), torch.equal(*parts)]
    return same


def test_on_one_node_it_changes_nothing(pools: Any) -> None:
    assert all(all(row) for row in pools(2).run(on_one_node))


def one_format_each(rank: Rank, numel: int) -> Attempt:
    """The ranks of node b have another format."""
    with rank.comm.new_group(timeout_s=15) as group:
        wire = "int8" if rank.rank < 2 else "fp8"
        before = torch.ones(numel)
        tensor = before.clone()
        found = attempt(group.all_reduce, tensor, wire=wire)
        assert torch.equal(tensor, before), "bytes came before the nodes agreed"
    return found


@pytest.mark.parametrize("numel", [10, 100_000])
def test_nodes_with_different_formats_are_told(clusters: Clusters, numel: int) -> None:
    for found in clusters("aabb").run(one_format_each, numel):
        assert found.kind == "DesyncError", found
        assert "wire differs: int8 on rank" in found.text
        assert "fp8 on rank" in found.text


def fed_back(rank: Rank, numel: int, wire: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Several steps with the errors of each in the next one."""
    feedback, results = torch.zeros(numel), []
    for step in range(4):
        tensor = tensor_of(bits_of(rank.rank, "float32", numel, step), "float32")
        call = Call(
            verb=Verb.all_reduce,
            input=tensor,
            output=tensor,
            op="avg",
            wire=wire,
            feedback=feedback,
        )
        rank.comm.issue(call)
        results.append(tensor)
    return results, feedback


@pytest.mark.parametrize("nodes", ["aabb", pytest.param("abc", marks=SLOW)])
@pytest.mark.parametrize("numel", [1000, 65_537, 150_001])
@pytest.mark.parametrize("wire", ["int8", "fp8"])
def test_errors_come_back_in_the_next_call(
    clusters: Clusters, nodes: str, numel: int, wire: str
) -> None:
    """Each node feeds back its own errors, a rank those of the elements that it codes."""
    rows = clusters(nodes).run(fed_back, numel, wire)
    places = ranks_by_node(nodes) or []
    errors = [np.zeros(numel, np.float32) for _ in places]
    for step in range(4):
        arrays = [bits_of(rank, "float32", numel, step) for rank in range(len(nodes))]
        given = []
        for node, values in enumerate(wire_oracle.partials(arrays, "float32", "AVG", places)):
            one, errors[node] = wire_oracle.with_feedback(values, errors[node], wire)
            given.append(one)
        want = wire_oracle.through_wire(wire_oracle.add(given), wire)
        for results, _ in rows:
            assert np.array_equal(results[step].numpy(), want), f"step {step}"
    for node, ranks in enumerate(places):
        assert np.array_equal(sum(rows[rank][1].numpy() for rank in ranks), errors[node])
