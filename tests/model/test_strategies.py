# SPDX-License-Identifier: Apache-2.0
"""Groups, buckets, placement and the strategies made of them.

The pages docs/placement.md and docs/overlap.md print more, and test_docs.py holds them to it.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fastcoll.cli import app
from fastcoll_model.buckets import Layer, overlap
from fastcoll_model.builders import build
from fastcoll_model.checker import ScheduleError, check
from fastcoll_model.errors import ModelError
from fastcoll_model.fabric import OneSwitch
from fastcoll_model.groups import consecutive, groups_us, side_by_side, strided
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.machines.machine import load_machine, load_network
from fastcoll_model.placement import best_ring, disjoint_rings
from fastcoll_model.simulator import simulate
from fastcoll_model.strategies import Planner, Sentence, Workload

LLAMA = Workload(num_params=7e9, num_layers=32, hidden=4096, tokens=4096)


def h100s(num_nodes: int) -> Cluster:
    return Cluster(load_machine("hgx-h100"), num_nodes, load_network("ndr-rail"))


def test_groups_are_dealt_out() -> None:
    assert [list(g) for g in consecutive(6, 3)] == [[0, 1, 2], [3, 4, 5]]
    assert [list(g) for g in strided(6, 3)] == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(ModelError, match=r"6 ranks .* groups of 4"):
        strided(6, 4)


def test_groups_side_by_side_take_as_long_as_one_where_nothing_is_shared() -> None:
    ring = build("all_reduce", "ring", 4)
    alone = simulate(ring, OneSwitch(4, 1.0, 1e-3), 1e5).time_us
    together = side_by_side(ring, strided(12, 4))
    assert simulate(together, OneSwitch(12, 1.0, 1e-3), 1e5).time_us == pytest.approx(alone)
    with pytest.raises(ScheduleError):  # no all_reduce of all twelve: groups stay apart
        check(together)


def test_groups_that_share_a_card_wait_for_each_other() -> None:
    """Check that 4 groups between nodes take 4 times as long: 4 x RTX 4090 have one card."""
    cluster = Cluster(load_machine("rtx4090-pcie"), 2, load_network("25gbe"))
    size = 1e9
    four = groups_us("all_gather", cluster, strided(8, 2), size)
    one_link_us = size / 2 / 3.1e3
    assert four == pytest.approx(4 * one_link_us, rel=0.01)


def test_rings_elsewhere() -> None:
    ring, gbps = best_ring(load_machine("l40s-pcie"))
    assert (len(ring), gbps) == (8, 25)
    assert disjoint_rings(load_machine("dgx-a100")) == []  # no wire joins two GPUs directly
    with pytest.raises(ModelError, match="72 ranks"):
        best_ring(load_machine("gb200-nvl72"))


def test_buckets_hide_behind_the_backward_pass() -> None:
    layers = [Layer(100.0, 10.0)] * 4
    one_by_one = overlap(layers, 1.0, lambda size: size / 20)  # 5 us for 10 us of computation
    assert [(b.start_us, b.end_us) for b in one_by_one.buckets] == [
        (10, 15),
        (20, 25),
        (30, 35),
        (40, 45),
    ]
    assert (one_by_one.exposed_us, one_by_one.communication_us) == (5, 20)
    all_at_once = overlap(layers, 1000.0, lambda size: size / 20)
    assert (len(all_at_once.buckets), all_at_once.exposed_us) == (1, 20)
    slow = overlap(layers, 1.0, lambda size: size / 5)  # 20 us each: they queue up
    assert slow.exposed_us == 10 + 4 * 20 - 40
    with pytest.raises(ModelError, match="must hold something"):
        overlap(layers, 0, lambda size: size)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 1e3)), min_size=1, max_size=12),
    st.floats(1, 1e7),
    st.floats(0, 100),
)
def test_every_gradient_is_reduced_once_it_is_there(parts, bucket_bytes, alpha) -> None:
    layers = [Layer(*part) for part in parts]
    found = overlap(layers, bucket_bytes, lambda size: alpha + size / 100)
    assert sum(b.size_bytes for b in found.buckets) == pytest.approx(sum(p[0] for p in parts))
    for before, after in zip(found.buckets, found.buckets[1:], strict=False):
        assert after.start_us >= before.end_us
    assert all(b.start_us >= b.ready_us for b in found.buckets)
    assert found.exposed_us <= found.communication_us + 1e-6


def sentences(num_nodes: int = 2) -> dict[str, Sentence]:
    return {s.strategy: s for s in Planner(LLAMA, h100s(num_nodes)).all()}


def moved(sentence: Sentence) -> float:
    return sum(p.times * p.size_bytes for p in sentence.phrases)


def test_zero_says_what_the_paper_says() -> None:
    """Check Rajbhandari et al. 2020: 16 bytes a parameter; stage 3 moves 1.5 times DDP's bytes."""
    said, n, weights = sentences(), 16, 14e9
    memory = {name: one.memory_gb for name, one in said.items()}
    assert memory["DDP"] == pytest.approx(16 * 7)
    assert memory["ZeRO-1"] == pytest.approx((4 + 12 / n) * 7)
    assert memory["ZeRO-2"] == pytest.approx((2 + 14 / n) * 7)
    assert memory["ZeRO-3 / FSDP"] == pytest.approx(16 / n * 7)
    # An all_reduce of D counts as a reduce_scatter and an all_gather of D.
    assert moved(said["DDP"]) == pytest.approx(weights)
    assert moved(said["ZeRO-1"]) == moved(said["ZeRO-2"]) == pytest.approx(2 * weights)
    assert moved(said["ZeRO-3 / FSDP"]) == pytest.approx(3 * weights)


def test_a_strategy_that_does_not_fit_says_so() -> None:
    said = sentences()
    assert said["DDP"].problem == "needs 112 GB of the 80 GB of a rank"
    assert list(said)[-1] == "DDP"
    assert not said["ZeRO-3 / FSDP"].problem


def test_tensor_parallelism_speaks_four_times_a_layer() -> None:
    [inside, outside] = sentences()["tensor x data"].phrases
    assert (inside.verb, inside.times, inside.ranks, inside.links) == ("all_reduce", 128, 8, "node")
    assert inside.size_bytes == 8 * 4096 * 4096 * 2  # the tokens of 8 ranks
    assert inside.exposed_us == inside.time_us
    assert (outside.ranks, outside.links) == (2, "network")
    split = sentences()["tensor + sequence x data"].phrases[:2]
    assert [p.verb for p in split] == ["reduce_scatter", "all_gather"]


def test_a_pipeline_has_its_bubble() -> None:
    one = sentences()["pipeline x data"]
    assert one.bubble_us == pytest.approx(one.compute_us * (2 - 1) / 8)  # (p - 1) / m


def test_computation_is_six_operations_per_parameter_and_token() -> None:
    expected_us = 6 * 7e9 * 4096 / (989e12 * 0.4) * 1e6
    assert sentences()["DDP"].compute_us == pytest.approx(expected_us)
    for one in sentences().values():
        assert 0 < one.efficiency <= 1
        assert all(p.exposed_us <= p.time_us + 1e-6 for p in one.phrases)


def test_one_rank_has_nothing_to_say() -> None:
    one_node = {s.strategy: s for s in Planner(LLAMA, h100s(1)).all()}
    assert [p.verb for p in one_node["tensor x data"].phrases] == ["all_reduce"]


def test_what_cannot_be_planned() -> None:
    with pytest.raises(ModelError, match=r"cpu-2s.*tflops"):
        Planner(LLAMA, Cluster(load_machine("cpu-2s")))
    with pytest.raises(ModelError, match="800 ranks"):
        Planner(LLAMA, h100s(100))


def test_the_command(tmp_path: Path) -> None:
    runner = CliRunner()
    model = ["--params", "7B", "--layers", "32", "--hidden", "4096", "--topology", "hgx-h100"]
    shown = runner.invoke(app, ["plan", *model])
    assert shown.exit_code == 0, shown.output
    assert "needs 112 GB" in shown.output
    assert "64 x all_gather of 438 MB in 8, node" in shown.output
    assert "placement" not in shown.output  # one node: nothing to misplace
    assert "nothing fits" not in shown.output
    huge = runner.invoke(app, ["plan", *model, "--params", "700B"])
    assert "nothing fits: 1400 GB of a rank's 80 GB are the least" in huge.output
    assert "of 43.8 GB in 8" in huge.output
    assert huge.exit_code == 1
    picture = tmp_path / "plan.svg"
    drawn = runner.invoke(app, ["plan", *model, "--json", "-", "--plot", str(picture)])
    found = json.loads(drawn.stdout)
    text = picture.read_text()
    assert all(f">{each}</text>" in text for each in ("99%", "needs 112 GB of the 80 GB of a rank"))
    assert {"strategy", "phrases", "efficiency"} <= set(found[0])
    for wrong, text in ((["--params", "many"], "many"), (["--ranks", "4"], "whole nodes")):
        refused = runner.invoke(app, ["plan", *model, *wrong])
        assert refused.exit_code == 2
        assert text in refused.output
