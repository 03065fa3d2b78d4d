# SPDX-License-Identifier: Apache-2.0
"""What all commands print through. Knows no command."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# A table cut to 80 columns is no use in a log; a terminal tells its own width.
_LOG_WIDTH = 200


def make_console() -> Console:
    """Return the console that results go to."""
    return Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)


def complain(text: str) -> None:
    """Say on stderr what went wrong."""
    Console(stderr=True).print(f"[red]error:[/red] {text}", highlight=False)


def matplotlib_is_there() -> None:
    """End with code 2 if pictures can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        complain("pictures need matplotlib: pip install 'fastcoll\\[bench]'")
        raise typer.Exit(2)


@contextmanager
def quiet_progress(title: str, total: float) -> Iterator[Progress]:
    """Yield a progress bar (its only task has id 0) that moves only when it is told to.

    A bar that redraws itself from a thread would take a core from what is being measured. It goes
    to stderr, so that results can be piped.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=hidden
    ) as progress:
        progress.add_task(title, total=total)
        yield progress
