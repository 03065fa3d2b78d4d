# SPDX-License-Identifier: Apache-2.0
"""The best times of libraries: by algorithms that exist, on devices that they support."""

import json
import re

import pytest
from typer.testing import CliRunner

from fastcoll.choose import algorithms
from fastcoll.cli import app
from fastcoll_model.builders import algorithms_of
from fastcoll_model.explain import compare
from fastcoll_model.libraries import LIBRARIES, Offer, offers
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.machines.machine import load_machine, load_network
from fastcoll_model.published import load_series
from fastcoll_model.schedule import VERBS

BY_NAME = {library.name: library for library in LIBRARIES}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_its_algorithms_are_known(library) -> None:
    assert set(library.algorithms) == set(VERBS)
    for verb, names in library.algorithms.items():
        assert set(names) <= set(algorithms_of(verb))


def test_fastcolls_are_those_that_it_has() -> None:
    named = {name for names in BY_NAME["fastcoll"].algorithms.values() for name in names}
    # Those without a schedule on paper can't be compared: nccl, say, is another library. The model
    # does not promise multimem before a machine has shown where it wins.
    on_paper = {name for verb in VERBS for name in algorithms_of(verb)}
    of_one_machine = {one.name for one in algorithms.ALL} & on_paper - {"multimem"}
    over_nodes = BY_NAME["fastcoll"].over_nodes
    assert over_nodes is not None
    assert named == of_one_machine | set(over_nodes)


def test_a_library_is_as_good_as_its_best_algorithm_and_what_a_call_costs() -> None:
    cluster, size = Cluster(load_machine("hgx-h100")), 64 << 20
    fast = compare("all_reduce", cluster, 8, size, "fast")
    made = offers(compare("all_reduce", cluster, 8, size), fast, cluster)
    found = {one.library: one for one in made}
    assert (found["NCCL"].algorithm, found["fastcoll"].algorithm) == ("multimem", "two_shot")
    assert fast.best.time_us is not None
    assert (found["NCCL"].wires_us, found["NCCL"].call_us) == (fast.best.time_us, 14.6)
    assert found["fastcoll"].call_us is None  # no GPU has been measured
    names = [one.name for one in LIBRARIES]  # no order across what was measured and what was not
    able = [one.library for one in made if one.wires_us is not None]
    assert able == [name for name in names if name in able]
    assert "order of its own" in found["NCCL"].remark
    assert "order" not in found["fastcoll"].remark
    assert found["Gloo"] == Offer("Gloo", "", None, None, "works on cpu tensors")
    cluster = Cluster(load_machine("cpu-2s"))
    gathered = compare("all_gather", cluster, 8, 1024)
    found = {one.library: one for one in offers(gathered, gathered, cluster)}
    assert found["NCCL"].wires_us is None
    assert "order" not in found["MPI"].remark


def test_what_an_nccl_call_costs_is_what_was_published() -> None:
    [series] = [s for s in load_series("hgx-h200") if s["system"] == "8 x H200, NCCL"]
    size_bytes, published_us = series["points"][0]
    fast = compare("all_reduce", Cluster(load_machine("hgx-h200")), 8, size_bytes, "fast")
    names = BY_NAME["NCCL"].algorithms["all_reduce"]
    wires_us = min(c.time_us for c in fast.candidates if c.time_us and c.algorithm in names)
    assert BY_NAME["NCCL"].call_us["gpu"] == pytest.approx(published_us - wires_us, abs=0.05)


def test_several_nodes() -> None:
    cluster = Cluster(load_machine("hgx-h100"), 2, load_network("ndr-rail"))
    found = compare("reduce_scatter", cluster, 16, 1 << 26, "fast")
    by_name = {one.library: one for one in offers(found, found, cluster)}
    assert by_name["NCCL"].algorithm == "hierarchical"
    assert "order" not in by_name["NCCL"].remark  # any order was asked for
    found = compare("broadcast", cluster, 16, 1 << 26)
    by_name = {one.library: one for one in offers(found, found, cluster)}
    assert found.best.algorithm != "hierarchical"
    assert by_name["fastcoll"].algorithm == "hierarchical"  # no other way over nodes


def test_the_command_shows_them() -> None:
    arguments = ["explain", "reduce_scatter", "1M", "--topology", "hgx-h100"]
    shown = CliRunner().invoke(app, arguments).output
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json", "-"]).stdout)["libraries"]
    assert {one["library"] for one in found} == {"fastcoll", "NCCL", "Gloo", "MPI"}
    for one in found:
        assert one["library"] in shown
        assert one["wires_us"] is None or f"{one['wires_us']:.4g}" in shown
    assert "a call us" in shown
    assert re.search(r"fastcoll .*not measured", shown)
