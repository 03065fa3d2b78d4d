# SPDX-License-Identifier: Apache-2.0
"""The output of all commands. Knows no command."""

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fastcoll.text import printable_lines

# A table cut to 80 columns is no use in a log; a terminal tells its own width.
_LOG_WIDTH = 200
_PICTURES = (".svg", ".png", ".pdf")
T = TypeVar("T")
# Takes the arguments of rich's Progress.update by name: description, advance, completed.
ShowProgress: TypeAlias = Callable[..., None]


def make_console() -> Console:
    """Return the console that results go to."""
    return Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)


def make_table(title: str, names: Iterable[str], numbers: Collection[str] = ()) -> Table:
    """Return a table with these columns, of which some hold numbers."""
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="right" if name in numbers else "left")
    return table


def parsed(parse: Callable[[str], T], text: str, option: str) -> T:
    """Return the value of an option's text; `parse` raises ValueError if it has none."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def complain(text: str) -> None:
    """Print an error on stderr."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"[red]error:[/red] {escape(printable_lines(text))}", highlight=False)


def matplotlib_is_there() -> None:
    """End with code 2 if pictures can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        complain("pictures need matplotlib: pip install 'fastcoll[bench]'")
        raise typer.Exit(2)


def writable(path: Path | None) -> Path | None:
    """Return a file that an option names, if it can be written: told before minutes are spent.

    Its folder is made. For the callback of an option.
    """
    if path is None:
        return None
    try:
        was_there = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not was_there:
            path.unlink(missing_ok=True)  # under torchrun every rank tries
    except OSError as error:
        raise typer.BadParameter(f"can't write {path}: {error.strerror}") from None
    return path


def picture(path: Path | None) -> Path | None:
    """Return a picture's file, if it can be written and its suffix names a kind of picture."""
    if path is not None and path.suffix not in _PICTURES:
        raise typer.BadParameter(f"{path}: a picture ends in {', '.join(_PICTURES)}")
    return writable(path)


@contextmanager
def quiet_progress(title: str, total: float) -> Iterator[ShowProgress]:
    """Yield a function that moves a progress bar, which does not move by itself.

    A bar that redraws itself from a thread would take a core from the measured calls. It goes to
    stderr, so that results can be piped.
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
        task = progress.add_task(title, total=total)
        yield partial(progress.update, task, refresh=True)
