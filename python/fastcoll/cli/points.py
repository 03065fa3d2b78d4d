# SPDX-License-Identifier: Apache-2.0
"""Options of the commands that measure points, and the progress that they show.

A point is a verb, a number of ranks and a size. Knows no command.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, TypeAlias

import typer

from fastcoll.cli.console import ExitCode, end_with, parsed, quiet_progress
from fastcoll.measure.pattern import Cell
from fastcoll.measure.pool import NotMeasured, available_cpus
from fastcoll.measure.sizes import format_size, parse_sizes
from fastcoll.measure.variants import VERBS
from fastcoll_model.errors import did_you_mean

SIZES_HELP = "FIRST:LAST:FACTOR or A,B,C"
ALL_VERBS = ",".join(VERBS)
Ranks: TypeAlias = Annotated[
    str, typer.Option(help="Group sizes, such as 2,4,8; default: powers of 2 that fit.")
]
Sizes: TypeAlias = Annotated[str, typer.Option(help=f"{SIZES_HELP}.")]
Verbs: TypeAlias = Annotated[str, typer.Option(help="Some of the verbs, separated by commas.")]


def parse_worlds(text: str) -> tuple[int, ...]:
    """Return the group sizes of an option.

    By default 2, 4, 8... up to a rank on every CPU; and on small machines twice that many.
    """
    num_cpus = len(available_cpus())
    most = num_cpus if num_cpus >= 4 else 2 * num_cpus
    usual = [world for world in (2, 4, 8, 16, 32, 64) if world <= max(2, most)]
    return _worlds(text, usual, 64)


def parse_gpu_worlds(text: str, num_gpus: int) -> tuple[int, ...]:
    """Return the group sizes of an option; by default those with a GPU for each rank.

    Where there is one GPU, a few that share it.
    """
    most = min(16, num_gpus)
    usual = [world for world in (2, 4, 8, most) if world <= max(2, most)] if most > 1 else [2, 4]
    return _worlds(text, usual, 16)


def _worlds(text: str, usual: list[int], most: int) -> tuple[int, ...]:
    try:
        worlds = [int(word) for word in text.split(",")] if text else usual
    except ValueError:
        worlds = []
    if not worlds or not all(2 <= world <= most for world in worlds):
        raise typer.BadParameter(f"write numbers from 2 to {most}", param_hint="--ranks")
    return tuple(dict.fromkeys(worlds))


def parse_sizes_option(text: str) -> tuple[int, ...]:
    return tuple(parsed(parse_sizes, text, "--sizes"))


def parse_verbs(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in VERBS]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is not one of {', '.join(VERBS)}{did_you_mean(unknown[0], VERBS)}",
            param_hint="--verbs",
        )
    return names


@contextmanager
def point_progress(cells: Sequence[Cell], refusal: str) -> Iterator[Callable[[Cell, str], None]]:
    """Yield a function that moves a progress bar to a point's variant.

    If nothing can be measured, say so behind `refusal` and end with code 1.
    """
    with quiet_progress("starting", len(cells)) as show:
        begun: set[Cell] = set()

        def show_point(cell: Cell, variant: str) -> None:
            begun.add(cell)
            text = f"{cell.verb}, {cell.world_size} ranks, {format_size(cell.size_bytes)}"
            show(description=f"{text}, {variant}", completed=len(begun))

        try:
            yield show_point
        except NotMeasured as error:
            end_with(ExitCode.FAILED, f"{refusal}: {error}")
