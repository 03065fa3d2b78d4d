# SPDX-License-Identifier: Apache-2.0
"""`fastcoll regret`: measure how good the choice of algorithms is on this machine.

Decides options and output. The measurement is in fastcoll.measure.
"""

import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from fastcoll.cli.console import STDOUT, JsonFile, make_console, make_table, write_json
from fastcoll.cli.points import (
    ALL_VERBS,
    Ranks,
    Sizes,
    Verbs,
    parse_sizes_option,
    parse_verbs,
    parse_worlds,
    point_progress,
)
from fastcoll.measure.regret import LIMIT, is_good, run_regret
from fastcoll.measure.results import to_text
from fastcoll.measure.sizes import format_size
from fastcoll.measure.variants import Points

Json = dict[str, Any]


def regret(
    ranks: Ranks = "",
    sizes: Sizes = "8:16M:4",
    verbs: Verbs = ALL_VERBS,
    json_path: JsonFile = None,
) -> None:
    """Time all algorithms that can carry out a call, and hold the chosen one against the best.

    Every result is checked before it is timed. Where one algorithm alone can do a call, it is said.
    With FASTCOLL_TUNING set, the choice is the table's. Nothing else should run then.
    """
    settings = Points(parse_worlds(ranks), parse_sizes_option(sizes), parse_verbs(verbs))
    with (
        tempfile.TemporaryDirectory(prefix="fc") as folder,
        point_progress(settings.cells(), "not measured") as show,
    ):
        document = run_regret(settings, Path(folder), show)
    table = regret_table(document)
    console = make_console(is_silent=json_path == STDOUT)
    if table.row_count:
        console.print(table)
    console.print(score(document))
    for line in without_choice(document):
        console.print(line)
    write_json(document, json_path, to_text)


def regret_table(document: Json) -> Table:
    """Return the choices that were neither near the best nor tied with it."""
    names = ("verb", "ranks", "size", "numerics", "chosen", "best", "regret")
    numbers = ("ranks", "size", "numerics", "regret")
    table = make_table("choices that are not the best one's equal", names, numbers)
    for row in document["rows"]:
        if is_good(row):
            continue
        size = format_size(row["size_bytes"])
        head = (row["verb"], str(row["world_size"]), size, row["numerics"])
        table.add_row(*head, row["chosen"], row["best"], f"{row['regret']:.0%}")
    return table


def score(document: Json) -> str:
    """Return how many choices were good."""
    verbs = dict.fromkeys(row["verb"] for row in document["rows"])
    return (
        f"{document['num_within']} of {document['num_points']} choices "
        f"({document['share_within']:.1%}) of {', '.join(verbs)} are within {LIMIT:.0%} of the "
        f"best, or can't be told from it; tuning table: {document['tuning']}"
    )


def without_choice(document: Json) -> list[str]:
    """Return which calls one algorithm alone can carry out, a line for each range of sizes."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for point in document["no_choice"]:
        sizes.setdefault((point["verb"], point["only"]), []).append(point["size_bytes"])
    verbs: dict[str, list[str]] = {}
    for (verb, only), known in sizes.items():
        ends = [format_size(size) for size in sorted({min(known), max(known)})]
        verbs.setdefault(f"of {' to '.join(ends)}: {only} alone can carry it out", []).append(verb)
    return [f"no choice: {', '.join(names)} {what}" for what, names in verbs.items()]
