# SPDX-License-Identifier: Apache-2.0
"""`fastcoll demo`: data-parallel training, its gradients averaged by fastcoll and by Gloo.

Decides options and output. The training itself is in fastcoll.measure.
"""

import importlib.util
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fastcoll.cli.console import (
    STDOUT,
    ExitCode,
    JsonFile,
    end_with,
    end_without,
    make_console,
    make_table,
    parsed,
    picture,
    quiet_progress,
    write_json,
)
from fastcoll.measure.demo import PHASES, make_config, run_demo
from fastcoll.measure.plot import plot_demo
from fastcoll.measure.pool import NotMeasured
from fastcoll.measure.results import to_text
from fastcoll.measure.sizes import format_number, parse_count
from fastcoll.measure.training import num_gradients

Json = dict[str, Any]
_DEFAULT_STEPS, _LARGE_STEPS, _LARGE_PARAMS = 200, 30, 5_000_000


def demo(
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Processes that train together.")] = 2,
    params: Annotated[
        str, typer.Option(help="Parameters of the network; 25M makes 100 MB of gradients.")
    ] = "100K",
    steps: Annotated[
        int | None, typer.Option(min=10, help="Steps per training; fewer for large networks.")
    ] = None,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="fastcoll's gradients come from fastcoll.empty().")
    ] = False,
    plot: Annotated[Path, typer.Option(help="Where the picture goes.", callback=picture)] = Path(
        "fastcoll-demo.png"
    ),
    json_path: JsonFile = None,
) -> None:
    """Train a network on handwritten digits on several ranks, and check that it went right.

    Three trainings with the same seeds: gradients averaged by fastcoll, by Gloo, and on one process
    with the whole batch. Ends with an error if a check fails.
    """
    for module, package in (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")):
        if importlib.util.find_spec(module) is None:
            end_without(f"the demo needs {package}: pip install 'fastcoll[demo]'")
    num_params = parsed(parse_count, params, "--params")
    num_steps = steps or (_LARGE_STEPS if num_params > _LARGE_PARAMS else _DEFAULT_STEPS)
    console = make_console(is_silent=json_path == STDOUT)
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        config = make_config(Path(folder), ranks, num_params, num_steps, symmetric)
        console.print(
            f"Handwritten digits, {num_gradients(config.training):,} parameters "
            f"({4e-6 * num_gradients(config.training):.3g} MB of gradients), {ranks} ranks, "
            f"{num_steps} steps of {config.training.batch_size} digits"
        )
        with quiet_progress("starting the ranks", len(PHASES) * num_steps) as show:

            def on_step(phase: str, step: int, loss: float) -> None:
                done = PHASES.index(phase) * num_steps + step + 1
                show(description=f"{phase}: loss {loss:.4f}", completed=done)

            try:
                document = run_demo(config, on_step)
            except NotMeasured as error:
                end_with(ExitCode.FAILED, f"the demo stopped: {error}")
    _print_document(document, console)
    plot_demo(document, plot)
    console.print(f"picture: {plot}", markup=False)
    write_json(document, json_path, to_text)
    if not all(check["passed"] for check in document["checks"]):
        raise typer.Exit(ExitCode.FAILED)


def _milliseconds(phase: Json, key: str) -> str:
    return format_number(phase[key] / 1e3) if key in phase else "-"


def _print_document(document: Json, console: Console) -> None:
    parts = ("communication\nms", "waiting\nms", "compute\nms")
    names = (*parts, "first\nloss", "last\nloss", "accuracy")
    columns = ("averaged by", *names)
    table = make_table("median per step, slowest rank", columns, names)
    for phase in document["phases"]:
        table.add_row(
            phase["name"],
            _milliseconds(phase, "communication_median_us"),
            _milliseconds(phase, "waiting_median_us"),
            _milliseconds(phase, "compute_median_us"),
            f"{phase['losses'][0]:.4f}",
            f"{phase['losses'][-1]:.4f}",
            f"{phase['accuracy']:.1%}",
        )
    console.print(table)
    ratio = document["communication_ratio"]
    console.print(
        f"communication takes [bold]{format_number(ratio)}x[/bold] less time with fastcoll than "
        "with Gloo"
        + ("; both trainings end in the same bits" if document["same_bits_as_gloo"] else "")
    )
    for check in document["checks"]:
        mark = "[green]passed[/green]" if check["passed"] else "[red]FAILED[/red]"
        console.print(f"{mark}  {check['what']} ({check['found']})")
