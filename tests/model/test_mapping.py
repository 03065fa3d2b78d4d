# SPDX-License-Identifier: Apache-2.0
"""Which groups get the neighbours: every rank in one group of each kind, and the cost of orders."""

import json
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fastcoll.cli import app
from fastcoll_model.errors import ModelError
from fastcoll_model.groups import consecutive, strided
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.machines.machine import load_machine, load_network
from fastcoll_model.mapping import Axis, axes_of, groups_along, mappings
from fastcoll_model.strategies import Planner, Workload

LLAMA = Workload(num_params=7e9, num_layers=32, hidden=4096, tokens=4096)


def h100s(num_nodes: int) -> Cluster:
    return Cluster(load_machine("hgx-h100"), num_nodes, load_network("ndr-rail"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_every_rank_is_in_one_group_along_each_axis(sizes: list[int]) -> None:
    for at, size in enumerate(sizes):
        groups = groups_along(sizes, at)
        assert sorted(rank for group in groups for rank in group) == list(range(prod(sizes)))
        for group in groups:
            places = [[r // prod(sizes[:i]) % n for i, n in enumerate(sizes)] for r in group]
            assert [place.pop(at) for place in places] == list(range(size))
            assert all(place == places[0] for place in places)


def test_the_first_axis_has_the_neighbours_and_the_last_is_far_apart() -> None:
    assert groups_along([4, 3], 0) == consecutive(12, 4)
    assert groups_along([4, 3], 1) == strided(12, 3)


def test_tensor_groups_get_the_neighbours() -> None:
    axes = axes_of(LLAMA, {"data": 2, "pipeline": 2, "tensor": 8})
    found = mappings(axes, h100s(4))
    assert len(found) == 6
    assert found[0].order[0] == "tensor"
    assert found[-1].order[-1] == "tensor"
    assert found[-1].time_us > 2 * found[0].time_us
    assert [one.time_us for one in found] == sorted(one.time_us for one in found)


def test_an_order_costs_what_the_plan_says_of_it() -> None:
    """Compare the planner's tensor x data with the order (tensor, data) of 8 x 2."""
    cluster = h100s(2)
    [inside, outside] = Planner(LLAMA, cluster).tensor().phrases
    found = mappings(axes_of(LLAMA, {"tensor": 8, "data": 2}), cluster)
    [best] = [one for one in found if one.order == ("tensor", "data")]
    assert best.axis_us["tensor"] == pytest.approx(inside.time_us, rel=0.01)
    # One call here, a bucket for each layer there.
    latencies_us = outside.times * 20
    assert best.axis_us["data"] == pytest.approx(outside.time_us, abs=latencies_us)


def test_volumes() -> None:
    sizes = {"tensor": 4, "expert": 2, "data": 2, "pipeline": 8}
    axes = {axis.name: axis for axis in axes_of(LLAMA, sizes)}
    token_bytes, micro = 4096 * 2, 4 * 8
    assert axes["data"] == Axis("data", 2, "all_reduce", 14e9 / (4 * 2 * 8), 1)
    # All micro-batches together: the tokens of all ranks that share a pipeline.
    tensor = axes["tensor"]
    assert tensor.times == 4 * (32 // 8) * micro
    assert tensor.size_bytes * micro == pytest.approx(4096 * token_bytes * 4 * 8)
    assert axes["pipeline"].times == 2 * micro
    assert axes["pipeline"].size_bytes == axes["expert"].size_bytes == tensor.size_bytes / 4


def test_a_send_takes_a_latency_and_its_bytes() -> None:
    machine = load_machine("hgx-h100")
    axes = [Axis("pipeline", 8, "send", 1e6, 3)]
    [one] = mappings(axes, Cluster(machine))
    wire = machine.bottleneck("gpu0", "gpu1")
    assert one.time_us == pytest.approx(3 * (1.0 + 1e6 / (wire.gbps * 1e3)))
    alone = Axis("data", 1, "all_reduce", 1e6, 3)
    assert mappings([alone, *axes], Cluster(machine))[0].axis_us["data"] == 0


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tensor": 4}, "4 tensor are 4 ranks, and there are 16"),
        ({"tensor": 4, "data": 2}, "4 tensor x 2 data are 8 ranks"),
        ({"tensor": 0}, "tensor=0"),
        ({"width": 16}, "no axis 'width'; the axes are tensor, expert, data, pipeline"),
    ],
)
def test_groups_that_do_not_fit(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        mappings(axes_of(LLAMA, sizes), h100s(2))


def test_the_command() -> None:
    model = ["--params", "7B", "--layers", "32", "--hidden", "4096", "--topology", "hgx-h100"]
    arguments = ["plan", *model, "--ranks", "16", "--network", "ndr-rail", "--groups"]
    shown = CliRunner().invoke(app, [*arguments, "tensor=8,data=2"])
    assert shown.exit_code == 0, shown.output
    told = CliRunner().invoke(app, [*arguments, "tensor=8,data=2", "--json", "-"])
    found = json.loads(told.stdout)
    assert found[0]["order"] == ["tensor", "data"]
    for one in found:
        assert ", ".join(one["order"]) in shown.output
        assert f"{one['time_us'] / 1e3:.3g}" in shown.output
    for wrong in ("tensor", "tensor=x", "tensor=3", "tensor=-8,data=2"):
        assert CliRunner().invoke(app, [*arguments, wrong]).exit_code == 2
    both = CliRunner().invoke(app, [*arguments, "tensor=8,data=2", "--plot", "x.svg"])
    assert both.exit_code == 2
    assert "not --groups" in both.output
