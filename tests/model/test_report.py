# SPDX-License-Identifier: Apache-2.0
"""The report: one page that is whole, that needs no other, and agrees with the commands."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table
from typer.testing import CliRunner

from fastcoll.cli import app
from fastcoll.cli.findings import plan_or_reason, read_measured
from fastcoll.cli.html import Section, page
from fastcoll.cli.report import measured_section
from fastcoll.errors import UsageError
from fastcoll.measure.pattern import make_cell
from fastcoll.measure.regret import judge
from fastcoll.measure.results import SCHEMA_NAME
from fastcoll.measure.tune import make_document
from fastcoll.measure.variants import request_of
from fastcoll_model.machines.cluster import Cluster
from fastcoll_model.machines.machine import load_machine
from fastcoll_model.strategies import Workload
from tests.support.damage import damaged

pytest.importorskip("matplotlib")
LLAMA = Workload(num_params=7e9, num_layers=32, hidden=4096, tokens=4096)
VOID = ("meta", "img")
OUTSIDE = ("src", "href", "srcset", "data", "action")


class Reader(HTMLParser):
    """Takes a page apart; text that HTML does not allow is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)
        links = [address[1:] for address in self.addresses if address.startswith("#")]
        assert set(links) <= set(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs), f"<{tag}> has an attribute twice"
        assert tag != "img" or given.get("alt")
        assert tag not in ("p", "table", "ul", "section") or "p" not in self.open
        assert tag not in ("td", "th") or self.open[-1] == "tr"
        self.ids += [given["id"] or ""] if "id" in given else []
        self.addresses += [given[name] or "" for name in OUTSIDE if name in given]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th", "p", "li", "caption"):
            self.cells.append(data)


class Written(NamedTuple):
    page: Reader
    text: str
    numbers: dict[str, Any]


def regret_document() -> dict[str, Any]:
    times = {
        name: {"time_us": time_us, "low_us": time_us, "high_us": time_us, "num_windows": 3}
        | {"segment_bytes": 1 << 17}
        for name, time_us in (("one_shot", 9.0), ("two_shot", 4.0), ("chain", 8.0))
    }
    cell = make_cell("all_reduce", "float32", "sum", 1024, 2)
    row = judge(request_of(cell, "same_bits"), cell, times, None)
    return {
        "kind": "regret",
        "schema": SCHEMA_NAME,
        "command": "fastcoll regret",
        "date": "2026-01-02T03:04:05",
        "commit": None,
        "machine": {
            "cpu_model": "a <CPU> & more",
            "num_cpus": 2,
            "num_usable_cpus": 2,
            "num_numa_nodes": 1,
            "kernel": "6",
        },
        "versions": {"python": "3"},
        "load_average": 0.0,
        "settings": {"world_size": 2},
        "tuning": "none",
        "num_points": 1,
        "num_within": 0,
        "share_within": 0.0,
        "rows": [row],
        "no_choice": [],
    }


def tuning_document() -> dict[str, Any]:
    from fastcoll.choose.costs import Costs

    row = {"verb": "all_reduce", "world_size": 2, "num_cpus": 2, "size_bytes": 1024}
    row |= {"algorithm": "chain", "segment_bytes": 128 << 10}
    row |= {"time_us": 7.25, "low_us": 7, "high_us": 8}
    return make_document([row], is_complete=True, fallback=Costs(0.5, 1e-4, 1e-4, 1e-4, 5.0))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("report")
    out, numbers = folder / "report.html", folder / "numbers.json"
    arguments = ["report", "-o", str(out), "--json", str(numbers)]
    for name, document in (("regret", regret_document()), ("tuning", tuning_document())):
        (folder / f"{name}.json").write_text(json.dumps(document))
        arguments += ["--measured", str(folder / f"{name}.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    text = out.read_text(encoding="utf-8")
    return Written(Reader(text), text, json.loads(numbers.read_text()))


@pytest.mark.slow
def test_the_page_is_whole_and_needs_no_other(written: Written) -> None:
    assert written.text.startswith("<!DOCTYPE html>")
    pictures = [a for a in written.page.addresses if not a.startswith("#")]
    assert len(pictures) == 9
    for address in pictures:
        kind, data = address.split(",", 1)
        assert kind == "data:image/svg+xml;base64"
        drawn = base64.b64decode(data).decode()
        for element in ElementTree.fromstring(drawn).iter():
            for name, value in element.attrib.items():
                assert not name.endswith("href") or value.startswith("#"), value
        assert "@import" not in drawn
    outside = re.sub(r"data:[^\"]*", "", written.text)
    assert not re.search(r"https?:|@import|url\(|<script", outside)
    assert '<meta name="viewport" content="width=device-width' in outside  # readable on a phone


@pytest.mark.slow
def test_the_page_shows_what_the_commands_print(written: Written) -> None:
    shown = " ".join(" ".join(written.page.cells).split())
    commands = (
        ["topo", "hgx-h100"],
        ["explain", "all_gather", "64M", "--topology", "hgx-h100"],
        ["plan", "--topology", "hgx-h100", "--params", "7B", "--layers", "32", "--hidden", "4096"],
    )
    for command in commands:
        printed = CliRunner().invoke(app, command).output
        numbers = re.findall(r"\d+\.\d+|\d{2,}%?", printed)
        assert len(numbers) > 15
        assert [number for number in numbers if number not in shown] == []
    for fact in ("needs 112 GB of the 80 GB", "proven: 80 steps, 24 signals", "choice: two_shot"):
        assert fact in shown


@pytest.mark.slow
def test_the_page_shows_its_numbers_and_what_was_measured(written: Written) -> None:
    cells = set(written.page.cells)
    numbers = written.numbers
    for one in numbers["all_reduce_fast"]:
        times = [c["time_us"] for c in one["candidates"] if c["time_us"] is not None]
        forms = {
            time_us: ".4g" if time_us < 1e4 else ".0f" for time_us in [*times, one["least_us"]]
        }
        assert {f"{time_us:{form}}" for time_us, form in forms.items()} <= cells
    for row in [*numbers["published"]["fitted"], *numbers["published"]["unfitted"]]:
        wanted = {row["system"], f"{row['published_us']:g}", f"{row['error']:+.0%}", row["source"]}
        assert wanted <= cells
    assert {s["strategy"] for s in numbers["plan"]} <= cells
    regret, tuned = numbers["measured"]
    assert f"{regret['rows'][0]['regret']:.0%}" in cells
    assert f"{tuned['rows'][0]['time_us']:.4g} to 7.25" in cells
    assert any(cell.startswith("Measured on a <CPU> & more, 2026-01-02") for cell in cells)


def test_the_reader_would_notice_a_broken_page() -> None:
    """Break a page in each way that the reader must notice."""
    table = Table(title="t")
    table.add_column("a & b")
    table.add_row("<i>[bold]x[/bold]")
    good = page("p", ["line"], [Section("one", [table]), Section("two", ["text"])])
    assert "&lt;i&gt;x" in good
    Reader(good)
    for old, new in (
        ("</table>", ""),
        ('id="part1"', 'id="part0"'),
        ("#part1", "#part7"),
        ("<td>", "<td><p>"),
        ("</tr>", "</td>"),
    ):
        assert old in good
        with pytest.raises((AssertionError, IndexError)):
            Reader(good.replace(old, new, 1))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "can't be read as JSON"),
        ("[]", "neither fastcoll regret nor fastcoll tune"),
        (json.dumps(regret_document() | {"kind": "bench"}), "neither fastcoll regret"),
        (json.dumps(regret_document() | {"rows": []}), ".rows"),
        (json.dumps(tuning_document() | {"costs": {}}), ".costs"),
    ],
)
def test_a_file_that_is_no_measurement_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    done = CliRunner().invoke(
        app, ["report", "-o", str(tmp_path / "x.html"), "--measured", str(path)]
    )
    assert done.exit_code == 2
    assert reason in " ".join(done.output.split())
    assert not (tmp_path / "x.html").exists()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_damaged_measurement_is_shown_or_refused(tmp_path_factory, data: st.DataObject) -> None:
    document = damaged(data, data.draw(st.sampled_from([regret_document(), tuning_document()])))
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_text(json.dumps(document))
    try:
        found = read_measured(path)
    except UsageError as error:
        assert "damaged.json" in str(error)
        return
    Reader(page("measured", [], [measured_section([found])]))


def test_ranks_that_make_no_plan_are_told_so() -> None:
    for machine, ranks, reason in (
        ("rtx4090-pcie", 2, "a plan needs whole nodes"),
        ("cpu-2s", 64, "cpu-2s does not say how fast a rank computes"),
    ):
        plan, no_plan = plan_or_reason(Cluster(load_machine(machine)), ranks, LLAMA)
        assert plan == []
        assert no_plan.startswith(reason)
    assert plan_or_reason(Cluster(load_machine("rtx4090-pcie")), 4, LLAMA)[1] == ""
