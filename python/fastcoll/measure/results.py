# SPDX-License-Identifier: Apache-2.0
"""Result files: the documents of measurements, checked against two schemas.

result.schema.json has the part that all kinds share. kinds.schema.json has the kinds that commands
write, and bench/kinds.schema.json those of the programs there.

Decides the form of the files under bench/results. Knows nothing of how anything was measured.
"""

import importlib.util
import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastcoll.documents import worst_fault
from fastcoll.measure.busbw import algbw_gbps, busbw_gbps
from fastcoll.measure.machine import load_average, now, read_commit, read_machine, read_versions
from fastcoll.measure.pattern import Cell
from fastcoll.measure.rounds import Outcome

# Result files are committed, so they must not name a user's folders.
_ABSOLUTE_PATH = re.compile(r"(?<![\w.])(?:/[^/\s\"',:=]+)*/([^/\s\"',:=]+)")
SCHEMA_NAME = "fastcoll-result-1"
_log = logging.getLogger(__name__)
_SCHEMA_PATH = Path(__file__).with_name("result.schema.json")
KINDS = Path(__file__).with_name("kinds.schema.json")
Json = dict[str, Any]


def shorten(argument: str) -> str:
    """Return a command's argument with the last part only of every absolute path in it."""
    return _ABSOLUTE_PATH.sub(r"\1", argument)


def command_line(argv: Sequence[str] | None = None) -> str:
    """Return the command that runs now (or `argv`), as one could type it again."""
    words = list(sys.argv if argv is None else argv)
    program = Path(words[0]).name
    first = "fastcoll" if program in ("__main__.py", "fastcoll", "__init__.py") else program
    return " ".join([first, *(shorten(word) for word in words[1:])])


def provenance() -> Json:
    """Return the origin that every result file has: command, commit, machine, versions."""
    commit = read_commit(Path(__file__).parent, Path.cwd())
    return {
        "schema": SCHEMA_NAME,
        "command": command_line(),
        "date": now(),
        "commit": asdict(commit) if commit else None,
        "machine": asdict(read_machine()),
        "versions": read_versions(),
        "load_average": load_average(),
    }


def cell_record(cell: Cell, outcome: Outcome) -> Json:
    """Return one library's entry in one row."""
    summary = outcome.summary
    record: Json = {
        "library": outcome.library,
        "status": "not measured" if summary is None else "measured",
        "reason": outcome.reason,
        "num_wrong": outcome.num_wrong,
    }
    if summary is not None:
        record |= {key: _rounded(value) for key, value in asdict(summary).items()}
        record |= {
            "algbw_gbps": _rounded(algbw_gbps(cell.size_bytes, summary.time_us)),
            "busbw_gbps": _rounded(
                busbw_gbps(cell.verb, cell.size_bytes, summary.time_us, cell.world_size)
            ),
            "iterations": outcome.iterations,
            "idle_cpu_s": _rounded(outcome.idle_cpu_s),
            "windows_us": [[_rounded(value) for value in window] for window in outcome.windows_us],
        }
    return record


def row_record(cell: Cell, outcomes: Sequence[Outcome]) -> Json:
    """Return one row: one size, all libraries, and how many times slower each peer is."""
    first = outcomes[0].summary
    ratios = {}
    for outcome in outcomes[1:]:
        peer = outcome.summary
        if first is not None and peer is not None:
            ratios[outcome.library] = {
                "median": _rounded(peer.time_us / first.time_us),
                "best": _rounded(peer.best_us / first.best_us),
            }
    return {
        "size_bytes": cell.size_bytes,
        "count": cell.total_numel,
        "type": cell.dtype,
        "op": cell.op,
        "ratios": ratios,
        "cells": [cell_record(cell, outcome) for outcome in outcomes],
    }


def validate(document: Json, kinds: Path = KINDS) -> None:
    """Check a document against the schema of all, and against that of some kinds.

    Raises:
        jsonschema.ValidationError: it does not fit.
    """
    # Through JSON and back, so that the check sees the same as a reader of the file.
    read = json.loads(json.dumps(document))
    fault = worst_fault(read, _SCHEMA_PATH) or worst_fault(read, kinds)
    if fault is not None:
        raise fault


def to_text(document: Json, kinds: Path = KINDS) -> str:
    """Check a document and return the text of its file.

    A machine with GPUs may lack jsonschema. There the file is written unchecked, and a line of the
    log says so.

    Raises:
        jsonschema.ValidationError: it does not fit the schema.
    """
    if importlib.util.find_spec("jsonschema"):
        validate(document, kinds)
    else:
        _log.warning("jsonschema is not installed: the result is not checked against its schema")
    return in_lines(document)


def write(document: Json, path: Path, kinds: Path = KINDS) -> None:
    """Check a document and write it, making the folder.

    Raises:
        jsonschema.ValidationError: it does not fit the schema; nothing is written.
    """
    text = to_text(document, kinds)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def in_lines(document: Json, margin: str = "") -> str:
    """Return JSON with a line per entry, and per element of long lists: readable, and fit for git.

    `margin` stands before each line of an entry that is a document itself.
    """
    entries = []
    for key, value in document.items():
        text = json.dumps(value)
        if _is_long(value):
            rows = ",".join(f"\n{margin}  {json.dumps(element)}" for element in value)
            text = f"[{rows}\n{margin} ]"
        elif isinstance(value, dict) and any(map(_is_long, value.values())):
            text = in_lines(value, margin + " ")
        entries.append(f"\n{margin} {json.dumps(key)}: {text}")
    return "{" + ",".join(entries) + f"\n{margin}}}"


def _is_long(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")
