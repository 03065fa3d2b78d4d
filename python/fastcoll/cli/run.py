# SPDX-License-Identifier: Apache-2.0
"""`fastcoll run`: a program on several ranks of this machine.

Decides options and output. Starting and ending the ranks is fastcoll.ranks's matter.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fastcoll.cli.console import end_with
from fastcoll.ranks.output import Sink
from fastcoll.ranks.processes import Program, Ranks

# An option behind the program is the program's own.
CONTEXT = {"allow_interspersed_args": False}


def run(
    program: Annotated[str, typer.Argument(help="A Python file; with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its own arguments and options.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, max=1024, help="Processes.")] = 2,
    module: Annotated[
        bool, typer.Option("-m", help="PROGRAM is a module, as of python -m.")
    ] = False,
    bind: Annotated[
        bool, typer.Option(help="Share the CPUs out where there is one for each rank.")
    ] = True,
    prefix: Annotated[
        bool, typer.Option(help="Put the rank before each line; else ranks write as they are.")
    ] = True,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going", help="Let the others go on after a failure (fastcoll.shrink)."
        ),
    ] = False,
) -> None:
    """Run a Python program on several ranks of this machine, and end them all if one fails.

    Every rank finds its peers by itself: fastcoll.init(), or torch's init_process_group(), as under
    torchrun. OMP_NUM_THREADS is the number of a rank's cores, unless it is set. The exit code is
    that of the first rank that failed, or 128 and the signal that killed it.
    """
    if not module and not Path(program).exists():
        raise typer.BadParameter(f"there is no file {program}", param_hint="PROGRAM")
    command = [sys.executable, *(["-m"] if module else []), program, *(arguments or [])]
    sinks = (_sink(1), _sink(2)) if prefix else None
    with Ranks(Program(command, ranks, sinks, bind)) as started:
        started.wait(keep_going)
    if failure := started.first_failure():
        end_with(failure.exit_code, failure.describe(ranks))


def _sink(fd: int) -> Sink:
    """Return a writer of bytes to this process's own stdout (1) or stderr (2)."""
    stream = sys.stdout if fd == 1 else sys.stderr

    def write(text: bytes) -> None:
        if stream is not None:  # closed as this process started
            stream.buffer.write(text)
            stream.buffer.flush()

    return write
