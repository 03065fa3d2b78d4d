# SPDX-License-Identifier: Apache-2.0
"""The output of all commands. Knows no command."""

import importlib.util
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fastcoll.text import printable_lines

# A table cut to 80 columns is no use in a log; a terminal tells its own width.
_LOG_WIDTH = 200
_NO_LIMIT = 1000
_PICTURES = (".svg", ".png", ".pdf")
STDOUT = Path("-")
_AS_TEXT = partial(json.dumps, indent=1)
T = TypeVar("T")
# Takes the arguments of rich's Progress.update by name: description, advance, completed.
ShowProgress: TypeAlias = Callable[..., None]


def make_console(wide: bool = False, is_silent: bool = False) -> Console:
    """Return the console that results go to.

    Args:
        wide: With room for every column.
        is_silent: Shows nothing, as JSON goes to stdout.
    """
    width = _NO_LIMIT if wide else None if sys.stdout.isatty() else _LOG_WIDTH
    return Console(width=width, quiet=is_silent, highlight=False)


def make_table(title: str, names: Iterable[str], numbers: Collection[str] = ()) -> Table:
    """Return a table with these columns, of which some hold numbers."""
    table = Table(title=title, title_justify="left")
    for name in names:
        # A cell that is cut ("0.\u2026") says nothing; one that is folded can be read.
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        table.add_column(name, justify=justify, overflow="fold")
    return table


def fits(table: Table, console: Console) -> bool:
    """Return whether a table has room without a line break that it does not ask for."""
    unlimited = console.options.update(max_width=_NO_LIMIT)
    return console.measure(table, options=unlimited).maximum <= console.width


def fit(
    make: Callable[[Collection[str]], Table], spare: Sequence[str], console: Console
) -> tuple[Table, str]:
    """Return a table that fits, and a remark about the columns that it went without.

    Args:
        make: Makes it without the columns of these names.
        spare: The columns that may go, the first one first.
        console: Where it goes.
    """
    for count in range(len(spare) + 1):
        table = make(spare[:count])
        if fits(table, console):
            break
    dropped = ", ".join(" ".join(name.split()) for name in spare[:count])
    return table, f"no room for {dropped}: --wide shows all" if dropped else ""


def in_parts(
    make: Callable[[Sequence[str]], Table], names: Sequence[str], console: Console
) -> Iterator[Table]:
    """Yield tables that fit, each with some of the columns that are alike, such as ranks."""
    while names:
        count = next((n for n in range(len(names), 1, -1) if fits(make(names[:n]), console)), 1)
        yield make(names[:count])
        names = names[count:]


def parsed(parse: Callable[[str], T], text: str, option: str) -> T:
    """Return the value of an option's text; `parse` raises ValueError if it has none."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


class ExitCode(IntEnum):
    """Why a command ended, beside 0. `fastcoll run` has its program's code.

    130 and 143 are Ctrl-C and SIGTERM, as a shell has them.
    """

    FAILED = 1  # it ran, and what it looked for is not there, not right, or not measured
    USAGE = 2  # an argument, an option, a setting or a file is wrong
    MISSING = 3  # this installation or machine lacks what it needs


def complain(text: str) -> None:
    """Print an error on stderr."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[red]error:[/red] {escape(printable_lines(text))}")


def end_with(code: int, text: str) -> NoReturn:
    """Print an error on stderr, and end."""
    complain(text)
    raise typer.Exit(code) from None


def end_without(text: str) -> NoReturn:
    """Say which thing is missing here, and end."""
    end_with(ExitCode.MISSING, text)


def matplotlib_is_there() -> None:
    """End if pictures can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        end_without("pictures need matplotlib: pip install 'fastcoll[bench]'")


def writable(path: Path | None) -> Path | None:
    """Return a file that an option names, if it can be written: told before minutes are spent.

    Its folder is made. For the callback of an option.
    """
    if path is None or path == STDOUT:
        return path
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


JsonFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=writable,
        help="Write the result as JSON; - is stdout, without anything else.",
    ),
]
Plot: TypeAlias = Annotated[
    Path | None, typer.Option(callback=picture, help="Draw it (.svg, .png or .pdf).")
]
Wide: TypeAlias = Annotated[
    bool, typer.Option("--wide", help="Show every column, also where the terminal has no room.")
]


def write_json(document: Any, path: Path | None, as_text: Callable[[Any], str] = _AS_TEXT) -> None:
    """Write a result as JSON to a file, if there is one, and say so, or to stdout."""
    if path is None:
        return
    text = as_text(document)
    if path == STDOUT:
        typer.echo(text)
        return
    path.write_text(text + "\n", encoding="utf-8")
    typer.echo(f"result: {path}")


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
