# SPDX-License-Identifier: Apache-2.0
"""Writes rows to a file as parts yield them: a process that is ended leaves the rows so far."""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

Part = Callable[[], Iterator[dict[str, Any]]]


def save(path: Path, document: dict[str, Any]) -> None:
    """Write a document so that it is whole whenever this process is ended."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document))
    new.replace(path)


def run_parts(
    path: Path,
    document: dict[str, Any],
    parts: list[Part],
    budget_s: float,
    recover: Callable[[], None] = lambda: None,
) -> None:
    """Append the rows of all parts until the time is up; a part that fails is noted.

    Args:
        path: The file, which is whole after every row.
        document: Its other fields, with "rows" and "failed".
        parts: Functions that yield rows.
        budget_s: Seconds after which no further row is waited for.
        recover: Called after a failure, before the next part.

    Raises:
        SystemExit: A part failed.
    """
    end = time.monotonic() + budget_s
    for part in parts:
        try:
            for row in part():
                document["rows"].append(row)
                save(path, document | {"complete": False})
                if time.monotonic() > end:
                    return
        except (RuntimeError, AssertionError) as error:
            print(f"{_name(part)}: {error}", flush=True)
            lines = str(error).splitlines() or [""]
            document["failed"].append(f"{_name(part)}: {lines[-1]}"[:300])
            recover()
    save(path, document | {"complete": not document["failed"]})
    if document["failed"]:
        raise SystemExit(f"{len(document['failed'])} parts failed")


def _name(part: Part) -> str:
    if isinstance(part, partial):
        return f"{part.func.__name__}{part.args}"
    return part.__name__
