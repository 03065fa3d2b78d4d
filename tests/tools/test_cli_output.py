# SPDX-License-Identifier: Apache-2.0
"""The form of the output of all commands: 80 columns, JSON, exit codes, help, completion."""

import importlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from fastcoll import env
from fastcoll.choose import tuning
from fastcoll.cli import app, console
from fastcoll.cli.bench import print_document
from fastcoll.machine import gpu
from fastcoll.measure.results import validate
from fastcoll.measure.sizes import format_number

runner = CliRunner()
RESULTS = Path(__file__).parents[2] / "bench/results"
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
PLAN = "plan --topology hgx-h100 --params 7B --layers 32 --hidden 4096"
ON_PAPER = (
    "explain all_reduce 1M --topology hgx-h100",
    "explain all_reduce 1M",
    PLAN,
    "schedule ring --ranks 16",
    "topo",
    "topo hgx-h100",
    "doctor",
)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output as on a terminal of 80 columns."""
    monkeypatch.setattr(console, "_LOG_WIDTH", 80)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("command", ON_PAPER)
def test_80_columns_cut_nothing(command: str) -> None:
    output = runner.invoke(app, command.split()).output
    table = [line for line in output.splitlines() if re.search("[┃│┏└]", line)]
    assert table or command.endswith("doctor")
    assert max(map(len, table)) <= 80
    assert "…" not in output


@pytest.mark.usefixtures("narrow")
def test_a_plan_has_one_phrase_a_line() -> None:
    output = runner.invoke(app, PLAN.split()).output
    assert re.search(r"^  64 x all_gather of 438 MB in 8, node$", output, re.M)


@pytest.mark.usefixtures("narrow")
def test_a_schedule_of_many_ranks_shows_all_of_them() -> None:
    output = runner.invoke(app, ["schedule", "ring", "--ranks", "16"]).output
    assert all(re.search(rf"rank {rank}\b", output) for rank in range(16))


def shown(width: int, path: Path) -> str:
    document = json.loads(path.read_text())
    validate(document)
    file = io.StringIO()
    screen = Console(file=file, width=width)
    if document.get("kind") == "demo":
        importlib.import_module("fastcoll.cli.demo")._print_document(document, screen)
    else:
        print_document(document, screen)
    return file.getvalue()


@pytest.mark.parametrize("name", ["python-float32", "c-float32", "python-async", "demo"])
def test_measurements_are_readable_in_80_columns(name: str) -> None:
    [path, *_] = sorted(RESULTS.glob(f"*/{name}.json"))
    text = shown(80, path)
    assert "…" not in text
    table = [line for line in text.splitlines() if re.search("[┃│]", line)]
    assert max(map(len, table)) <= 80
    document = json.loads(path.read_text())
    if name != "demo":
        ratio = next(iter(document["rows"][0]["ratios"].values()))["median"]
        assert f"{format_number(ratio)}x" in text
        assert "no room for op, type" in text
        assert "no room" not in shown(1000, path)
        assert "algbw_gbps" in shown(1000, path)


def test_equal_reasons_are_told_once() -> None:
    output = runner.invoke(app, ["explain", "all_reduce", "1M", "--topology", "hgx-h100"]).output
    assert output.count("does not add in rank order") == 1
    assert re.search(r"refused: \w+, \w+.*: does not add in rank order", " ".join(output.split()))


@pytest.mark.parametrize("command", [*(one for one in ON_PAPER if one != "topo"), "inspect"])
def test_json_goes_to_stdout_alone_or_to_a_file(command: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    written = runner.invoke(app, [*command.split(), "--json", str(path)])
    assert f"result: {path}" in written.output
    told = runner.invoke(app, [*command.split(), "--json", "-"])
    assert type(json.loads(told.stdout)) is type(json.loads(path.read_text()))
    assert (told.exit_code, written.exit_code) in ((0, 0), (1, 1))


def test_a_schedules_json_has_its_moves() -> None:
    result = runner.invoke(app, ["schedule", "ring", "--ranks", "3", "--json", "-"])
    told = json.loads(result.stdout)
    assert (told["world_size"], told["proof"]["rank_order"]) == (3, False)
    assert len(told["moves"]) == 12
    assert (told["moves"][0]["start_us"], told["moves"][0]["adds"]) == (1.0, True)


MISSING = (
    ("demo --plot FILE.png", "matplotlib"),
    ("schedule ring --plot FILE.png", "matplotlib"),
    ("report --out FILE.html", "matplotlib"),
)


@pytest.mark.parametrize(("command", "module"), MISSING)
def test_a_part_that_is_not_installed_has_a_code_of_its_own(
    command: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == module else name)
    result = runner.invoke(app, command.replace("FILE", str(tmp_path / "file")).split())
    assert (result.exit_code, module in result.output) == (3, True), result.output


@pytest.mark.parametrize("command", ["explain all_reduce 1M --device cuda", "tune --device cuda"])
def test_missing_gpu_support_has_one_code(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "problem", lambda: "built without GPU support")
    result = runner.invoke(app, command.split())
    assert (result.exit_code, "without GPU support" in result.output) == (3, True), result.output
    assert list(tmp_path.iterdir()) == []


def doctor(monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    module = importlib.import_module("fastcoll.cli.doctor")
    kept = [probe for probe in module._PROBES if probe[1] in ("settings", "tuning table")]
    monkeypatch.setattr(module, "_PROBES", kept)
    result = runner.invoke(app, ["doctor"])
    return result.exit_code, result.output


def test_doctor_ends_well_where_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor(monkeypatch)[0] == 0


def test_doctor_fails_for_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNING.name, "/no/file")
    code, output = doctor(monkeypatch)
    assert code == 1
    assert tuning.find().is_refusal
    assert re.search(r"error: not right: .*tuning table", output)


def test_the_version_is_told() -> None:
    result = runner.invoke(app, ["--version"])
    assert re.fullmatch(r"fastcoll \d+\.\d+.*\n", result.output)


def test_the_help_tells_the_exit_codes() -> None:
    short, long = runner.invoke(app, ["-h"]).output, runner.invoke(app, ["--help"]).output
    assert short == long
    assert "3 something is not installed" in " ".join(short.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_has_an_example_that_parses_and_no_file_of_the_repository(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("train.py").touch()
    text = " ".join(re.sub("[│╭╰─╮╯]", "", runner.invoke(app, [name, "-h"]).output).split())
    [example] = re.findall(r"Example: fastcoll (.*)", text)
    word, *arguments = shlex.split(example)
    assert word == name
    COMMANDS[name].make_context(name, arguments)  # raises if it does not parse
    assert not re.search(r"\b(bench|docs|scripts|tests)/", text)


def test_a_shell_completes_commands() -> None:
    typed = {"_FASTCOLL_COMPLETE": "complete_bash", "COMP_WORDS": "fastcoll be", "COMP_CWORD": "1"}
    result = runner.invoke(app, [], env=typed, prog_name="fastcoll")
    assert result.output.split() == ["bench"]
