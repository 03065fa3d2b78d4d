# SPDX-License-Identifier: Apache-2.0
"""Machines and networks as data, clusters of them, and their simulation."""

import dataclasses
import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll_model.builders import algorithms_of, build
from fastcoll_model.errors import ModelError
from fastcoll_model.fabric import on_one_switch
from fastcoll_model.formulas import Constants, hierarchical_all_reduce_us
from fastcoll_model.machines import machine as model
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.machines.machine import MACHINES, NETWORKS, load_machine, load_network
from fastcoll_model.regular import Shifts, shifts_of, simulate_on_switch, simulate_regular
from fastcoll_model.schedule import VERBS
from fastcoll_model.simulator import simulate
from tests.support.damage import damaged


def h100s(num_nodes: int, network: str = "ndr-rail") -> Cluster:
    return Cluster(load_machine("hgx-h100"), num_nodes, load_network(network))


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_is_whole(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    for one in machine.ranks:
        for other in machine.ranks:
            if one != other:
                way = machine.way(one, other)
                assert (way[0], way[-1]) == (one, other)
                assert not set(way[1:-1]) & set(machine.ranks)  # ranks don't forward
                assert machine.bottleneck(one, other) == machine.bottleneck(other, one)
    assert all(len(wire.source) > 5 for wire in machine.wires.values())


def test_traffic_takes_the_widest_way() -> None:
    machine = load_machine("dgx-1v")
    assert machine.way("gpu0", "gpu3") == ("gpu0", "gpu3")
    assert machine.bottleneck("gpu0", "gpu3").kind == "NVLink 2, two links"
    assert machine.way("gpu0", "gpu7") == ("gpu0", "pcie0", "cpu0", "cpu1", "pcie3", "gpu7")
    links = [w for (one, _), w in machine.wires.items() if one == "gpu0" and "NVLink" in w.kind]
    assert sum(wire.gbps for wire in links) == 6 * 20  # six links per V100


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_connects(name: str) -> None:
    cluster = h100s(40, name)
    network = load_network(name)
    near, far = cluster.route(0, 8), cluster.route(0, 39 * 8)
    assert min(cluster.bytes_per_us(link) for link in near.links) <= network.gbps * 1e3
    assert near.latency_us == network.latency_us
    several_leaves = network.nodes_per_leaf < 40
    assert far.latency_us == network.latency_us + several_leaves * network.spine_latency_us
    assert len(far.links) == len(near.links) + 2 * several_leaves


def test_a_rail_is_a_short_way_between_equal_places() -> None:
    cluster = h100s(2)
    assert len(cluster.route(3, 8 + 3).links) == 4  # to the card, the leaf, the card, the GPU
    assert len(cluster.route(3, 8 + 4).links) == 6  # rail 3 to rail 4: over the spine
    tree = h100s(2, "ndr-fat-tree")
    assert len(tree.route(3, 8 + 4).links) == 4


def test_an_oversubscribed_spine_is_shared() -> None:
    """Check 3:1 above a leaf of 8 cards: they have the bandwidth of 2.7 between leaves."""
    network = dataclasses.replace(load_network("25gbe"), nodes_per_leaf=1)
    cluster = Cluster(load_machine("hgx-h100"), 2, network)
    spine = next(link for link in cluster.route(0, 15).links if link.owner == -1)
    assert cluster.bytes_per_us(spine) == pytest.approx(8 * 3.1e3 / 3)
    size = 1e8
    rings = build("all_gather", "hierarchical_ring", 16, local_size=8)
    timing = simulate(rings, cluster, size)
    assert timing.link_bytes[spine] == pytest.approx(8 * size / 16)  # every rank reads its twin
    even = Cluster(load_machine("hgx-h100"), 2, dataclasses.replace(network, oversubscription=1))
    more_us = timing.time_us - simulate(rings, even, size).time_us
    assert more_us == pytest.approx((3 - 1) * size / 16 / 3.1e3)


def test_inside_a_node_and_between_nodes_the_formula_holds() -> None:
    """Compare simulation, one rank in place of all, and formula on two tiers of unshared links."""
    cluster, size = h100s(8), float(64 << 20)
    gamma = cluster.reduce_us_per_byte
    inside = Constants(1.0, 1 / 370e3, gamma)
    between = Constants(3.0, 1 / 50e3, gamma)
    expected = hierarchical_all_reduce_us(8, 8, size, inside, between)
    schedule = build("all_reduce", "hierarchical", 64, local_size=8)
    exact = simulate(schedule, cluster, size).time_us
    shifts = shifts_of(schedule, 8)
    assert shifts is not None
    one_rank = simulate_regular(schedule, cluster.under_one_leaf(), size, shifts).time_us
    staging = 2 * size * cluster.copy_us_per_byte
    assert exact == pytest.approx(expected + staging, rel=1e-9)
    assert one_rank == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("algorithm", ["hierarchical", "hierarchical_ring"])
@pytest.mark.parametrize("machine", ["hgx-h100", "rtx4090-pcie"])
def test_one_rank_in_place_of_all_where_cards_are_shared(algorithm: str, machine: str) -> None:
    """Check one rank for all on 4 x RTX 4090: the links of a node carry all its ranks' traffic."""
    cluster = Cluster(load_machine(machine), 4, load_network("roce-100"))
    n = cluster.num_ranks
    for verb in ("all_reduce", "reduce_scatter", "all_gather"):
        schedule = build(verb, algorithm, n, local_size=cluster.local_size)
        shifts = shifts_of(schedule, cluster.local_size)
        assert shifts is not None
        exact = simulate(schedule, cluster, 1e7).time_us
        found = simulate_regular(schedule, cluster.under_one_leaf(), 1e7, shifts).time_us
        assert found == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("machine", "num_ranks"), [("hgx-h100", 8), ("gb200-nvl72", 9)])
def test_one_rank_in_place_of_all_on_one_switch(machine: str, num_ranks: int) -> None:
    cluster = Cluster(load_machine(machine))
    switch = on_one_switch(cluster, num_ranks)
    assert switch is not None
    regular = 0
    for verb in VERBS:
        for algorithm in algorithms_of(verb):
            schedule = build(verb, algorithm, num_ranks, num_segments=2)
            if shifts_of(schedule) is None:
                continue
            for size in (1e3, 1e8):
                exact = simulate(schedule, cluster, size).time_us
                found = simulate_on_switch(schedule, switch, size).time_us
                assert found == pytest.approx(exact, rel=1e-9), (verb, algorithm)
            regular += 1
    assert regular > 10


def test_ranks_that_are_not_alike_are_on_no_switch() -> None:
    for machine in ("dgx-1v", "l40s-pcie", "cpu-2s"):
        cluster = Cluster(load_machine(machine))
        assert on_one_switch(cluster, cluster.num_ranks) is None, machine
    assert on_one_switch(h100s(2), 16) is None
    whole = load_machine("hgx-h100")
    slow = dict(whole.wires)
    port = next(ends for ends in slow if ends[0] == whole.ranks[3])
    slow[port] = dataclasses.replace(slow[port], gbps=slow[port].gbps / 2)
    assert on_one_switch(Cluster(dataclasses.replace(whole, wires=slow)), 8) is None


@pytest.mark.slow
def test_a_hundred_thousand_ranks_in_seconds() -> None:
    nodes = 12_500
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    cluster = h100s(nodes).under_one_leaf()
    schedule = build("all_reduce", "hierarchical_ring", 8 * nodes, local_size=8)
    shifts = shifts_of(schedule, 8)
    assert shifts is not None
    found = simulate_regular(schedule, cluster, float(1 << 30), shifts).time_us
    assert time.process_time() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 1 << 20  # 1 GiB
    gamma = cluster.reduce_us_per_byte
    size, share = float(1 << 30), (1 << 30) / 8
    ring = 2 * (nodes - 1) * 4.0 + (nodes - 1) / nodes * share * (2 / 50e3 + gamma)
    inside = 2 * 1.0 + 7 / 8 * size * (2 / 370e3 + gamma)
    assert found == pytest.approx(ring + inside + 2 * size * cluster.copy_us_per_byte)


def test_what_is_not_alike_is_not_simulated_by_one_rank() -> None:
    ring = build("all_reduce", "ring", 16)
    with pytest.raises(ModelError, match="ranks per node"):
        simulate_regular(ring, h100s(2).under_one_leaf(), 1e6, Shifts(1, 16))
    grid = build("all_reduce", "hierarchical_ring", 16, local_size=8)
    odd = Cluster(load_machine("dgx-1v"), 2, load_network("ndr-rail")).under_one_leaf()
    with pytest.raises(ModelError, match="is not like that"):
        simulate_regular(grid, odd, 1e6, Shifts(8, 2))
    with pytest.raises(ModelError, match="under_one_leaf"):
        wide = build("all_reduce", "hierarchical_ring", 8 * 40, local_size=8)
        simulate_regular(wide, h100s(40, "ndr-fat-tree"), 1e6, Shifts(8, 40))
    with pytest.raises(ModelError, match="less bandwidth above"):
        h100s(40, "25gbe").under_one_leaf()


def test_multicast_needs_its_switch() -> None:
    schedule = build("all_reduce", "multimem", 8)
    assert simulate(schedule, h100s(1), 1e6).time_us > 0
    with pytest.raises(ModelError, match="dgx-a100: no switch"):
        simulate(schedule, Cluster(load_machine("dgx-a100")), 1e6)


def test_a_cluster_needs_what_connects_it() -> None:
    with pytest.raises(ModelError, match="need a network"):
        Cluster(load_machine("hgx-h100"), 2)
    with pytest.raises(ModelError, match="0 nodes"):
        Cluster(load_machine("hgx-h100"), 0)


def machine_document(**changes: Any) -> dict[str, Any]:
    document = {
        "format": 1,
        "kind": "machine",
        "name": "small",
        "title": "two ranks",
        "ranks": ["a", "b"],
        "links": [
            {"between": [["a", "b"]], "kind": "wire", "gbps": 1, "latency_us": 1, "source": "test"}
        ],
        "reduce_gbps": 1,
        "copy_gbps": 1,
        "memory_gb": 1,
        "source": "test",
    }
    return document | changes


def link(*pairs: list[str], **changes: Any) -> dict[str, Any]:
    one = {"between": list(pairs), "kind": "wire", "gbps": 1, "latency_us": 1, "source": "test"}
    return one | changes


def written(tmp_path: Path, document: object) -> str:
    path = tmp_path / "topology.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_a_machine_from_a_file(tmp_path: Path) -> None:
    machine = load_machine(written(tmp_path, machine_document()))
    assert machine.ranks == ("a", "b")
    assert Cluster(machine).route(0, 1).latency_us == 1


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("{", "can't be read as JSON"),
        ([], '"kind" is not "machine"'),
        (machine_document(kind="network"), '"kind" is not "machine"'),
        (machine_document(format=2), "at format: 1 was expected"),
        (machine_document(ranks=[]), "at ranks"),
        (machine_document(speed=3), "speed"),
        (
            machine_document(links=[link(["a", "b"], gbps=0)]),
            "at links/0/gbps: 0 is less.*: write a number above 0",
        ),
        (
            machine_document(links=[link(["a", "b"], latency_us=-1)]),
            "at links/0/latency_us.*: write 0 or",
        ),
        (machine_document(links=[link(["a", "a"])]), "links/0/between/0: 'a' is linked to itself"),
        (machine_document(links=[link(["a", "b"], ["b", "a"])]), "links/0/between/1.*linked twice"),
        (machine_document(links=[link(["a", "c"])]), "at ranks/1: no link leads to 'b'"),
        (
            machine_document(
                ranks=["gpu0", "gpu1"], links=[link(["gpu0", "gpu1"]), link(["gpu1", "gpu7"])]
            ),
            "at links/1/between/0: there is no 'gpu7' among the ranks gpu0, gpu1; add it",
        ),
        (
            machine_document(ranks=["a", "b", "c"], links=[link(["a", "b"], ["c", "d"])]),
            "no way leads from 'a' to 'c'",
        ),
        (machine_document(nics={"z": "nic"}), "at nics/z: there is no rank 'z'"),
        (machine_document(nics={"a": "nic"}), "at nics/a: no link leads to 'nic'"),
        (machine_document(multicast="b"), "at multicast: 'b' has no link to 'b'"),
    ],
)
def test_a_wrong_file_is_refused_where_it_is_wrong(document, text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"topology\.json.*{text}"):
        load_machine(written(tmp_path, document))


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"no machine 'hal'.*dgx-1v.*hgx-h100"):
        load_machine("hal")
    with pytest.raises(ModelError, match=r"no network 'lan'.*25gbe.*xdr-rail"):
        load_network("lan")
    with pytest.raises(ModelError, match=r"nothing\.json: can't be read"):
        load_machine("nothing.json")


SHIPPED = [
    *((load_machine, model._CATALOGUE / "machines" / f"{name}.json") for name in MACHINES),
    *((load_network, model._CATALOGUE / "networks" / f"{name}.json") for name in NETWORKS),
]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused(tmp_path_factory, data: st.DataObject) -> None:
    """Check that a damaged file raises a ModelError or is read."""
    load, path = data.draw(st.sampled_from(SHIPPED))
    document = damaged(data, json.loads(path.read_text()))
    target = tmp_path_factory.getbasetemp() / "damaged.json"
    target.write_text(json.dumps(document))
    try:
        load(str(target))
    except ModelError as error:
        assert "damaged.json" in str(error)
