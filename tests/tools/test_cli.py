# SPDX-License-Identifier: Apache-2.0
"""The command line: refused arguments, and small runs of each command."""

import contextlib
import importlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fastcoll import api, env
from fastcoll.cli import app, main
from fastcoll.integrations import c10d_build
from fastcoll.measure.busbw import VERBS
from fastcoll.measure.pattern import make_cell
from fastcoll.measure.results import validate
from fastcoll.measure.rounds import measure_cell
from fastcoll.measure.session import BenchSettings, make_pool
from fastcoll.measure.timer import Budget

runner = CliRunner()


def findings() -> dict[str, Any]:
    result = runner.invoke(app, ["doctor", "--json", "-"])
    assert result.exit_code in (0, 1), result.output
    return {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}


def test_help_names_every_command() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in ("demo", "bench", "doctor", "inspect"))


@pytest.mark.parametrize("command", ["bench", "tune", "regret"])
def test_help_says_how_sizes_are_written(command: str) -> None:
    result = runner.invoke(app, [command, "--help"], terminal_width=200)
    assert result.exit_code == 0
    assert "FIRST:LAST:FACTOR" in result.output  # a word such as :END: would be shown as an emoji


def test_doctor_tries_what_fastcoll_needs_and_lists_every_setting() -> None:
    found = findings()
    assert found["memfd, sealed"]["state"] == "ok"
    assert found["memory passed to a peer"]["value"] == "works"
    assert {variable.name for variable in env.VARIABLES} <= set(found)
    assert {"SIMD level", "membarrier", "/dev/shm", "NVIDIA devices", "Gloo"} <= set(found)


@pytest.mark.parametrize(("reads", "state"), [(True, "ok"), (False, "note")])
def test_doctor_tells_who_reads_tensors(
    monkeypatch: pytest.MonkeyPatch, reads: bool, state: str
) -> None:
    assert api.READS_TENSORS  # of every torch that the tests meet
    monkeypatch.setattr(api, "READS_TENSORS", reads)
    assert findings()["tensors"]["state"] == state


def test_doctor_shows_the_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.NUMERICS.name, raising=False)
    on_gpus = "same_bits; fast on GPUs in groups of torch.distributed"
    assert findings()["numerics"]["value"] == on_gpus
    for asked in ("same_bits", "fast"):
        monkeypatch.setenv(env.NUMERICS.name, asked)
        assert findings()["numerics"]["value"] == asked


def test_the_torch_backend_is_taken_where_it_was_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    result = runner.invoke(app, ["build"])
    assert (result.exit_code, "no C++ compiler" in result.output) == (3, True)
    for setting, said in (
        ("auto", "in Python: it is not compiled yet"),
        ("compiled", "in Python: no C++ compiler"),
        ("python", "in Python: FASTCOLL_TORCH_BACKEND=python"),
    ):
        monkeypatch.setenv(env.TORCH_BACKEND.name, setting)
        assert findings()["torch backend"]["value"].startswith(said)
        with pytest.raises(c10d_build.NotBuiltError):
            c10d_build._ready()
    monkeypatch.setenv(env.TORCH_BACKEND.name, "auto")
    c10d_build._path().touch()
    assert findings()["torch backend"]["value"] == f"compiled: {c10d_build._path()}"


def test_doctor_shows_a_setting_that_does_not_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TIMEOUT_S.name, "soon")
    finding = findings()[env.TIMEOUT_S.name]
    assert finding["state"] == "no"
    assert "soon" in finding["value"]


def test_doctor_names_a_variable_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    misspelt = "FASTCOLL_" + "TIMEOUTS"
    monkeypatch.setenv(misspelt, "3")
    finding = findings()[misspelt]
    assert (finding["state"], "FASTCOLL_TIMEOUT_S" in finding["value"]) == ("no", True)


def test_doctor_goes_on_when_a_probe_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no such thing here")

    # The package's own name `doctor` is the command.
    doctor_module = importlib.import_module("fastcoll.cli.doctor")
    probes = tuple((section, name, broken) for section, name, _ in doctor_module._PROBES)
    monkeypatch.setattr(doctor_module, "_PROBES", probes)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert result.output.count("no such thing here") == len(probes)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bench", "all_reduce", "--vs", "nccl"], "it needs --device cuda"),
        (["bench", "all_reduce", "--vs", "goo"], "did you mean gloo?"),
        (["bench", "all_reduce", "--device", "cuda", "--vs", "gloo"], "nccl"),
        (["bench", "all_reduce", "--device", "cuda", "--level", "c"], "compiled loop"),
        (["bench", "all_reduce", "--sizes", "8:4:2"], "--sizes"),
        (["bench", "all_reduce", "--sizes", "8:16:x"], "factor"),
        (["bench", "all_reduce", "--window-us", "nan"], "--window-us"),
        (["bench", "all_reduce", "--window-us", "-1"], "--window-us"),
        (["bench", "all_reduce", "--plot", "a.gif"], ".png"),
        (["tune", "--minutes", "nan"], "--minutes"),
        (["bench", "all_reduce", "--dtype", "float31"], "float31"),
        (["bench", "all_reduce", "--op", "mean"], "mean"),
        (["bench", "allreduce"], "did you mean all_reduce?"),
        (["tune", "--verbs", "all_redcue"], "did you mean all_reduce?"),
        (["explain", "allreduce", "1M"], "did you mean all_reduce?"),
        (["bench", "all_to_none"], "all_to_none"),
        (["bench", "all_reduce", "--algorithm", "two_short"], "did you mean two_shot?"),
        (["bench", "all_reduce", "--numerics", "exact"], "same_bits"),
        (["bench", "all_reduce", "--async-op", "--level", "c"], "asynchronous"),
        (["bench", "all_reduce", "--async-op", "--device", "cuda"], "asynchronous"),
        (["explain", "all_reduce", "1M", "--ranks", "80000"], "--topology"),
        (["demo", "--params", "many"], "many"),
        (["demo", "--ranks", "1"], "ranks"),
    ],
)
def test_bad_options_are_named(arguments: list[str], text: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert text in " ".join(re.sub("[│╭╰─]", "", result.output).split())


UNWRITABLE = "/proc/none/file"
WRITERS = (
    "bench all_reduce --json FILE",
    "bench all_reduce --plot FILE.png",
    "demo --json FILE",
    "demo --plot FILE.png",
    "tune --out FILE",
    "regret --json FILE",
    "report --out FILE",
    "report --json FILE",
    "doctor --json FILE",
    "explain all_reduce 1M --json FILE",
    "plan --topology hgx-h100 --params 7B --layers 2 --hidden 8 --json FILE",
    "schedule ring --json FILE",
    "inspect --json FILE",
    "schedule ring --plot FILE.svg",
    "plan --topology hgx-h100 --params 7B --layers 2 --hidden 8 --plot FILE.svg",
    "topo here --json FILE",
    "inspect --trace FILE",
)


@pytest.mark.parametrize("command", WRITERS)
def test_a_file_that_cannot_be_written_is_told_at_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the files of defaults would be
    result = runner.invoke(app, command.replace("FILE", UNWRITABLE).split())
    assert result.exit_code == 2, result.output
    assert "can't write /proc/none" in result.output
    assert list(tmp_path.iterdir()) == []


def test_names_that_look_like_markup_are_shown_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(env.NODE_ID.name, "[/red]")
    result = runner.invoke(app, ["doctor"])
    assert "[/red]" in result.output
    result = runner.invoke(app, ["topo", "here", "--json", "[/red].json"])
    assert result.exit_code == 0, result.output
    assert "result: [/red].json" in result.output
    result = runner.invoke(app, ["topo", "[/red]"])
    assert result.exit_code == 2
    assert "[/red]" in result.output


def test_the_program_says_what_is_wrong_with_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("RANK", "first"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr("sys.argv", ["fastcoll", "bench", "all_reduce"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "RANK='first' must be a whole number" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("level", ["python", "c"])
def test_a_small_bench_runs_and_its_file_fits(level: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = f"--sizes 8,3000 --rounds 1 --window-us 200 --level {level} --json {path}"
    missing = f"--vs gloo,intelmpi --mpi-dir {tmp_path}"
    result = runner.invoke(app, ["bench", "all_reduce", *options.split(), *missing.split()])
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    validate(document)
    assert [row["size_bytes"] for row in document["rows"]] == [8, 3000]
    assert all(row["cells"][0]["num_wrong"] == 0 for row in document["rows"])
    assert document["one_way_flag_us"]
    gloo, missing_mpi = document["libraries"][1:]
    assert missing_mpi["status"] == "not measured"
    assert gloo["status"] == ("measured" if level == "python" else "not measured")


@pytest.mark.slow
def test_an_algorithm_is_measured_where_inputs_are_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = f"--sizes 64K --rounds 1 --window-us 200 --level c --json {path}"
    result = runner.invoke(app, ["bench", "reduce", "--algorithm", "two_shot", *options.split()])
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["rows"][0]["cells"][0]["status"] == "measured"


@pytest.mark.slow
def test_asynchronous_calls_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = "--async-op --sizes 1K --rounds 1 --window-us 200 --vs gloo,core"
    result = runner.invoke(app, ["bench", "gather", *options.split(), "--json", str(path)])
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    validate(document)
    assert document["settings"]["async_op"]
    (row,) = document["rows"]
    statuses = [cell["status"] for cell in row["cells"]]
    assert statuses == ["measured", "measured", "not measured"]
    assert [cell["num_wrong"] for cell in row["cells"][:2]] == [0, 0]
    result = runner.invoke(
        app, ["bench", "sendrecv", "--async-op", "--sizes", "1K", "--vs", "core"]
    )
    assert result.exit_code == 1
    assert "handles of their own" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("libraries", "options"),
    [
        (("fastcoll", "gloo"), {"symmetric": True}),
        (("fastcoll", "gloo"), {"async_op": True}),
        (("fastcoll",), {"level": "c"}),
    ],
    ids=["symmetric", "async", "compiled"],
)
def test_every_verb_is_measured(libraries: tuple[str, ...], options: Any, tmp_path: Path) -> None:
    """Measure every verb with the ranks of one bench: `bench VERB` asks them for one."""
    settings = BenchSettings("all_reduce", "float32", "sum", 2, (), libraries[1:], **options)
    pools = [make_pool(settings, library, tmp_path, [0, 1]) for library in libraries]
    budget = Budget(window_us=200, num_rounds=1)
    with contextlib.ExitStack() as stack:
        for pool in pools:
            stack.callback(pool.close)
            pool.start()
        for verb, size in itertools.product(VERBS, (8, 1 << 16)):
            if verb == "sendrecv" and settings.async_op:
                continue  # its handles are its own
            cell = make_cell(verb, "float32", "sum", 0 if verb == "barrier" else size, 2)
            for outcome in measure_cell(pools, cell, budget, lambda _: None):
                assert (outcome.reason, bool(outcome.windows_us)) == (None, True), (verb, outcome)
                assert outcome.num_wrong == (None if verb == "barrier" else 0), (verb, outcome)


@pytest.mark.slow
def test_a_small_demo_trains_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    plot, path = tmp_path / "demo.png", tmp_path / "demo.json"
    options = f"--params 20K --steps 40 --plot {plot} --json {path}"
    result = runner.invoke(app, ["demo", *options.split()])
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    document = json.loads(path.read_text())
    validate(document)
    assert all(check["passed"] for check in document["checks"])
    assert document["same_bits_as_gloo"]
