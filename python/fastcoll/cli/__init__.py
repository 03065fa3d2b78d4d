# SPDX-License-Identifier: Apache-2.0
"""The command line: `fastcoll COMMAND`, one file per command.

Decides names and help of the commands. Their work is in fastcoll.measure and in the commands'
own files.
"""

import signal
import sys
from types import FrameType

import typer

from fastcoll.cli.bench import bench
from fastcoll.cli.build import build
from fastcoll.cli.console import complain
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

app = typer.Typer(
    help="Collectives between the processes of one machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
for command in (
    demo,
    bench,
    doctor,
    build,
    inspect,
    schedule,
    explain,
    topo,
    plan,
    tune,
    regret,
    report,
):
    app.command()(command)
app.command(context_settings=CONTEXT)(run)


def _end(signum: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + signum)


def main() -> None:
    """Run the command line."""
    # Like Ctrl-C: the rank processes that a command started end with it.
    signal.signal(signal.SIGTERM, _end)
    try:
        app(prog_name="fastcoll")
    except (
        FastcollError,
        ModelError,
        OSError,
    ) as error:
        # A setting, or a disk that is full by now.
        complain(str(error))
        sys.exit(2)
