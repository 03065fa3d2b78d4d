# SPDX-License-Identifier: Apache-2.0
"""The choice on paper: refused algorithms, the winners by size, and the lower bounds."""

from dataclasses import replace

import pytest

from fastcoll_model.builders import algorithms_of, build
from fastcoll_model.checker import check
from fastcoll_model.errors import ModelError
from fastcoll_model.explain import adds_in_order, compare, price_us
from fastcoll_model.limits import least_us
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.machines.machine import MACHINES, load_machine, load_network
from fastcoll_model.schedule import REDUCTIONS, VERBS
from fastcoll_model.values import node_by_node

H100 = Cluster(load_machine("hgx-h100"))
FOUR_NODES = Cluster(load_machine("hgx-h100"), 4, load_network("ndr-rail"))


@pytest.mark.parametrize("verb", VERBS)
def test_every_algorithm_is_priced_or_refused_with_a_reason(verb: str) -> None:
    found = compare(verb, H100, 8, 1 << 20)
    assert {c.algorithm for c in found.candidates} == set(algorithms_of(verb))
    for candidate in found.candidates:
        assert (candidate.time_us is None) == bool(candidate.reason)
    times = [c.time_us for c in found.candidates if c.time_us is not None]
    assert times == sorted(times)


def test_same_bits_refuses_what_adds_in_another_order() -> None:
    refused = {
        c.algorithm: c.reason for c in compare("all_reduce", H100, 8, 1024).candidates if c.reason
    }
    assert "rank order" in refused["ring"]
    assert "rank order" in refused["multimem"]
    admitted = {c.algorithm for c in compare("all_reduce", H100, 8, 1024).candidates} - set(refused)
    assert admitted == {"one_shot", "two_shot", "chain"}
    assert not compare("all_reduce", H100, 8, 1024, "fast").candidates[0].reason


def test_the_paper_agrees_with_the_library_about_same_bits() -> None:
    """Compare the algorithms that same_bits admits with those that the checker finds in order."""
    from fastcoll.choose import algorithms
    from fastcoll.types import DType, Op, Request, Verb

    for verb in (Verb.all_reduce, Verb.reduce_scatter):
        request = Request(verb, DType.float32, Op.SUM, 999, 0, 6, "auto", "same_bits", 6)
        for algorithm in algorithms.ALL:
            if algorithm.name in algorithms_of(verb.name):
                admitted = algorithm.admits(request) is None
                assert admitted == adds_in_order(verb.name, algorithm.name), algorithm.name


@pytest.mark.slow
def test_small_messages_take_one_step_and_large_ones_move_less() -> None:
    assert compare("all_reduce", H100, 8, 64).best.algorithm == "one_shot"
    assert compare("all_reduce", H100, 8, 64 << 20).best.algorithm == "two_shot"
    assert compare("all_reduce", H100, 8, 64 << 20, "fast").best.algorithm == "multimem"
    assert (
        compare("all_reduce", FOUR_NODES, 32, 64 << 20, "fast").best.algorithm
        == "hierarchical_direct"
    )


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("verb", ["all_reduce", "all_gather", "broadcast", "all_to_all"])
def test_nothing_beats_the_limit(machine: str, verb: str) -> None:
    cluster = Cluster(load_machine(machine))
    world_size = min(8, cluster.local_size)
    for size in (1, 1 << 26):
        found = compare(verb, cluster, world_size, size, "fast")
        assert found.best.time_us is not None
        assert found.best.time_us >= found.least_us > 0


@pytest.mark.slow
def test_nothing_beats_the_limit_between_nodes() -> None:
    two_nodes = Cluster(load_machine("hgx-h100"), 2, load_network("ndr-rail"))
    for verb in VERBS:
        for size in (1, 1 << 26):
            found = compare(verb, two_nodes, 16, size, "fast")
            assert found.best.time_us is not None
            assert found.best.time_us >= found.least_us > 0
    assert least_us("all_reduce", H100, 1, 1 << 20) == 0


def test_large_worlds_are_priced_by_one_rank() -> None:
    many = Cluster(load_machine("hgx-h100"), 500, load_network("ndr-rail"))
    ring = build("all_reduce", "hierarchical_ring", 4000, local_size=8)
    assert price_us(ring, many, 1e9) > 2 * 499 * 3
    found = compare("all_reduce", many, 4000, 1 << 30, "fast")
    assert found.best.algorithm == "hierarchical_direct"
    reasons = {c.algorithm: c.reason for c in found.candidates}
    assert "not priced" in reasons["chain"]
    assert "neighbours are on other nodes" in reasons["ring"]
    assert compare("all_reduce", many, 4000, 1 << 30).best == found.best
    with pytest.raises(ModelError, match=r'too many steps for 4000 ranks.*numerics="fast" admits'):
        compare("reduce", many, 4000, 1 << 30)


@pytest.mark.slow
def test_what_has_a_root_is_priced_step_by_step() -> None:
    many = Cluster(load_machine("hgx-h100"), 64, load_network("ndr-rail"))
    for verb in ("gather", "scatter"):
        assert compare(verb, many, 512, 1 << 20).best.time_us
    assert compare("reduce", many, 256, 1 << 20).best.algorithm == "hierarchical_direct"


def test_over_nodes_same_bits_adds_node_by_node() -> None:
    """Add the sums of the nodes in their order, as fastcoll.nodes.reductions does."""
    proof = check(build("all_reduce", "hierarchical_direct", 6, local_size=2))
    assert set(proof.orders.values()) == {"0 + 1 + (2 + 3) + (4 + 5)"} == {node_by_node(3, 2)}
    assert node_by_node(1, 3) == node_by_node(3, 1) == "0 + 1 + 2"
    for verb in REDUCTIONS:
        found = compare(verb, FOUR_NODES, 32, 1 << 20)
        admitted = [c.algorithm for c in found.candidates if not c.reason]
        assert admitted == ["hierarchical_direct"], verb
        assert "does not add node by node" in found.candidates[-1].reason
        for local_size in (1, 2, 3, 4, 6):
            assert adds_in_order(verb, "hierarchical_direct", local_size)
    # In pairs of nodes, not one after the other: of three nodes that can't be told.
    assert not adds_in_order("all_reduce", "hierarchical", 3)
    machine = load_machine("l40s-pcie")
    one = replace(machine, ranks=machine.ranks[:1])
    one_each = Cluster(one, 4, load_network("roce-100"))
    admitted = {c.algorithm for c in compare("all_reduce", one_each, 4, 64).candidates if c.time_us}
    assert admitted >= {"two_shot", "hierarchical_direct"}


def test_ranks_that_do_not_fit() -> None:
    with pytest.raises(ModelError, match="9 ranks don't fill"):
        compare("all_reduce", H100, 9, 8)
    with pytest.raises(ModelError, match="12 ranks don't fill"):
        compare("all_reduce", FOUR_NODES, 12, 8)
