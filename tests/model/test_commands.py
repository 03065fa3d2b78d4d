# SPDX-License-Identifier: Apache-2.0
"""The commands that show schedules, topologies and choices."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastcoll.cli import app
from fastcoll_model.builders import build
from fastcoll_model.fabric import OneSwitch
from fastcoll_model.picture import rows
from fastcoll_model.simulator import simulate

runner = CliRunner()
PLAN = ["plan", "--topology", "hgx-h100", "--layers", "2", "--hidden", "8"]


def output(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_a_ring_moves_before_your_eyes() -> None:
    schedule = build("all_reduce", "ring", 3)
    timing = simulate(schedule, OneSwitch(3, 1.0, 1e-3), 3000, trace=True)
    assert rows(schedule, timing) == [
        (1.0, ["+1 <2", "+2 <0", "+0 <1"]),
        (3.0, ["+0 <2", "+1 <0", "+2 <1"]),
        (5.0, ["=2 <2", "=0 <0", "=1 <1"]),
        (7.0, ["=1 <2", "=2 <0", "=0 <1"]),
    ]


def test_schedule_shows_what_is_pushed_and_switched() -> None:
    pushed = output("schedule", "tree", "--verb", "broadcast", "--ranks", "4", "--root", "1")
    assert "0 >3" in pushed
    switched = output("schedule", "multimem", "--topology", "hgx-h100", "--ranks", "8")
    assert "<*" in switched
    assert ">*" in switched


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_schedule_draws(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"ring.{suffix}"
    output("schedule", "multimem", "--ranks", "3", "--plot", str(path))
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start


def test_explain_names_the_choice_and_every_refusal() -> None:
    text = output("explain", "all_reduce", "1M", "--topology", "hgx-h100")
    assert "does not add in rank order" in text
    arguments = ("--topology", "hgx-h100", "--ranks", "16", "--network", "ndr-rail", "--json", "-")
    found = json.loads(output("explain", "all_gather", "1M", *arguments))
    assert found["world_size"] == 16
    assert found["candidates"][0]["time_us"] >= found["least_us"]


@pytest.mark.slow
def test_topo_lists_and_shows() -> None:
    assert "gb200-nvl72" in output("topo")
    text = output("topo", "dgx-1v", "--network", "ndr-rail")
    assert "NVLink 2, two links: 40 GB/s" in text
    assert "rail-optimised" in text
    assert "gpu71" in output("topo", "gb200-nvl72")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["schedule", "magic"], "no schedule 'magic'; it has one_shot"),
        (["schedule", "two_short"], "did you mean two_shot?"),
        (["schedule", "ring", "--verb", "sum"], "no verb 'sum'"),
        (["schedule", "ring", "--verb", "allreduce"], "did you mean all_reduce?"),
        (["topo", "hgx-h10"], "did you mean hgx-h100?"),
        (["topo", "--network", "ndr-rial"], "did you mean ndr-rail?"),
        (["topo", "--json", "-"], "name a machine or a --network"),
        (["schedule", "tree", "--root", "9"], "root 9"),
        (["schedule", "ring", "--size", "big"], "--size"),
        (["schedule", "multimem", "--topology", "dgx-a100", "--ranks", "8"], "no switch"),
        (["explain", "all_reduce", "1M", "--topology", "hal"], "no machine 'hal'"),
        (["explain", "all_reduce", "1M", "--topology", "hgx-h100", "--ranks", "16"], "--network"),
        (["explain", "all_reduce", "1M", "--topology", "hgx-h100", "--ranks", "12"], "whole nodes"),
        (["explain", "sum", "1M", "--topology", "hgx-h100"], "no verb 'sum'"),
        (["explain", "all_reduce", "1M", "--topology", "hgx-h100", "--numerics", "x"], "same_bits"),
        (["topo", "hal"], "no machine 'hal'"),
        ([*PLAN, "--params", "0"], "a model has parameters"),
        ([*PLAN, "--params", "7B", "--utilisation", "nan"], "--utilisation"),
        (["topo", "--network", "lan"], "no network 'lan'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], text: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert text in " ".join(result.output.split())
