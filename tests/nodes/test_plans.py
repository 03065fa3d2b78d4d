# SPDX-License-Identifier: Apache-2.0
"""Plans are as ARCHITECTURE.md says: which is flat, and how many bytes the same bits take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastcoll.bootstrap.node_map import NodeMap
from fastcoll.calls.tensors import Call
from fastcoll.types import Verb
from tests.nodes import test_phases
from tests.nodes.test_phases import LARGE, SMALL, TWO, VERBS, Entry, problems, run

ALONE = NodeMap(((0,), (1,), (2,)), ("a", "b", "c"), ("a", "b", "c"))
THREE_PAIRS = NodeMap(((0, 1), (2, 3), (4, 5)), ("a", "b", "c"), ("a", "b", "c"))
NUMEL = 3 * LARGE  # in whole shards


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_with_one_rank_a_node_the_plan_is_flat(verb: Verb) -> None:
    """Nobody's node is asked for anything."""
    for numel in (0, 1, SMALL, LARGE + 1):
        records = run(ALONE, verb, numel)
        assert problems(ALONE, records) == []
        assert {entry.whom for entries in records for entry in entries} <= {"lane 0", "wait"}


def calls_of(dtype: torch.dtype) -> Callable[[Verb, int, int, int], Any]:
    def call_of(verb: Verb, numel: int, rank: int, world: int) -> Any:
        one = torch.zeros(numel, dtype=dtype)
        many = torch.zeros(numel * world, dtype=dtype)
        return Call(verb=verb, input=many if verb is Verb.reduce_scatter else one, output=one)

    return call_of


def sent(entry: Entry, num_nodes: int) -> float:
    """The bytes that a rank sends for what it asks of a carrier, which sends them in a ring."""
    shares = {"all_reduce": 2 * (num_nodes - 1) / num_nodes, "all_gather": num_nodes - 1}
    return shares[entry.what] * entry.given[0] if entry.what in shares else sum(entry.given)


@pytest.mark.parametrize(
    ("node_map", "verb", "dtype", "times"),
    [
        (TWO, Verb.all_reduce, torch.float32, 1),
        (THREE_PAIRS, Verb.all_reduce, torch.float32, 1),
        (TWO, Verb.all_reduce, torch.bfloat16, 2),
        (THREE_PAIRS, Verb.all_reduce, torch.bfloat16, 1.5),
        (TWO, Verb.reduce_scatter, torch.float16, 2),
        (THREE_PAIRS, Verb.reduce_scatter, torch.float16, 2),
    ],
)
def test_the_bytes_of_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, node_map: NodeMap, verb: Verb, dtype: torch.dtype, times: float
) -> None:
    """Between nodes, over those of a carrier that reduces in the type itself."""
    monkeypatch.setattr(test_phases, "call_of", calls_of(dtype))

    def total(by_carrier: bool) -> float:
        entries = run(node_map, verb, NUMEL, by_carrier)[1]  # no leader: it sends no packet
        return sum(sent(one, node_map.num_nodes) for one in entries if one.whom == "lane 1")

    assert total(False) == times * total(True)
