# SPDX-License-Identifier: Apache-2.0
"""The command line: `fastcoll COMMAND`, one file per command.

Decides names and help of the commands. Their work is in fastcoll.measure and in the commands'
own files.
"""

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Annotated

import typer

from fastcoll.bootstrap.identity import library_version
from fastcoll.cli.bench import bench
from fastcoll.cli.build import build
from fastcoll.cli.console import ExitCode, complain
from fastcoll.cli.demo import demo
from fastcoll.cli.doctor import doctor
from fastcoll.cli.explain import explain
from fastcoll.cli.inspect import inspect
from fastcoll.cli.plan import plan
from fastcoll.cli.regret import regret
from fastcoll.cli.report import report
from fastcoll.cli.run import CONTEXT, run
from fastcoll.cli.schedule import schedule
from fastcoll.cli.topo import topo
from fastcoll.cli.tune import tune
from fastcoll.errors import FastcollError
from fastcoll_model.errors import ModelError

_EPILOG = (
    "Exit codes: 0 all is well; 1 it ran, and something failed or was not found; 2 a wrong "
    "argument, setting or file; 3 something is not installed or not built here; 130 Ctrl-C; 143 "
    "SIGTERM. `fastcoll run` has its program's."
)
_HELP = {"help_option_names": ["-h", "--help"]}
# Each command, with a line that shows it; in the order of the help.
_EXAMPLES: dict[Callable[..., None], str] = {
    run: "run -n 4 train.py --epochs 3",
    demo: "demo --ranks 2 --params 1M",
    bench: "bench all_reduce --ranks 2 --sizes 8,4K,1M --vs gloo",
    doctor: "doctor --json report.json",
    build: "build",
    inspect: "inspect --watch 1",
    schedule: "schedule ring --verb all_reduce --ranks 4",
    explain: "explain all_reduce 1M --topology hgx-h100",
    topo: "topo hgx-h100 --json -",
    plan: "plan --topology hgx-h100 --params 7B --layers 32 --hidden 4096",
    tune: "tune --ranks 2 --minutes 2",
    regret: "regret --ranks 2 --sizes 4K,1M",
    report: "report --topology hgx-h100 --params 7B",
}

app = typer.Typer(
    help="Collectives between the processes of one machine.",
    epilog=_EPILOG,
    no_args_is_help=True,
    context_settings=_HELP,
    pretty_exceptions_show_locals=False,
)
for command, example in _EXAMPLES.items():
    context = {**_HELP, **(CONTEXT if command is run else {})}
    app.command(context_settings=context, epilog=f"Example: fastcoll {example}")(command)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fastcoll {library_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version  # its callback has ended the program


def _end(signum: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + signum)


def main() -> None:
    """Run the command line."""
    # Like Ctrl-C: the rank processes that a command started end with it.
    signal.signal(signal.SIGTERM, _end)
    try:
        app(prog_name="fastcoll")
    except (FastcollError, ModelError, OSError) as error:
        # A setting, or a disk that is full by now.
        complain(str(error))
        sys.exit(ExitCode.USAGE)
