# SPDX-License-Identifier: Apache-2.0
"""`fastcoll inspect`: the last calls of the ranks of this machine, read from outside.

Decides how it is shown; the ranks need not answer and may be stuck or stopped.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fastcoll.calls.recorder import Operation, RankStatus, find_pids, read_process, to_trace
from fastcoll.cli.console import (
    STDOUT,
    ExitCode,
    JsonFile,
    Wide,
    complain,
    end_with,
    fit,
    make_console,
    make_table,
    writable,
    write_json,
)
from fastcoll.errors import DriverError

_COLUMNS = ("group", "rank", "process", "#", "call", "plan", "state", "wait")
_SPARE = ("plan", "process", "wait")


def _collect(pids: list[int]) -> list[RankStatus]:
    """Read some processes, or all there are; unreadable ones are named and left out."""
    found = []
    for pid in pids or find_pids():
        try:
            statuses = read_process(pid)
        except (FileNotFoundError, ProcessLookupError):
            complain(f"there is no process {pid}")
            continue
        except PermissionError:
            complain(f"process {pid} is another user's")
            continue
        except (OSError, DriverError) as error:
            complain(f"process {pid}: {error}")
            continue
        if not statuses:
            complain(f"process {pid} is in no group of fastcoll")
        found += statuses
    return sorted(found, key=lambda status: (status.group, status.rank, status.pid))


def _age(operation: Operation, now_us: int) -> str:
    if operation.began_us and not operation.wait_began_us:
        took_s = ((operation.ended_us or now_us) - operation.began_us) / 1e6
        began_s = (now_us - operation.began_us) / 1e6
        return f"{'took' if operation.ended_us else 'runs for'} {took_s:.6f} s, {began_s:.3f} s ago"
    if not operation.wait_began_us:
        return ""
    waited_us = (operation.wait_ended_us or now_us) - operation.wait_began_us
    text = f"waited {waited_us / 1e6:.3f} s"
    began_s = (now_us - operation.wait_began_us) / 1e6
    return f"{text}, since {began_s:.3f} s ago"


def _table(
    statuses: list[RankStatus], last: int, now_us: int, without: Collection[str] = ()
) -> Table:
    """Return the table of the last calls of each rank, without some of its columns."""
    names = [name for name in _COLUMNS if name not in without]
    table = make_table("fastcoll inspect", names)
    for status in statuses:
        table.add_section()
        row = {
            "group": f"{status.group}{', broken' * status.is_broken}",
            "rank": f"{status.rank} of {status.world_size}",
            "process": f"{status.pid}{', stopped' * status.is_stopped}",
        }
        if not status.operations:
            row["call"] = "never called anything"
            table.add_row(*(Text(row.get(name, "")) for name in names))
        for one in status.operations[-last:]:
            row |= {"#": str(one.call), "call": one.what, "plan": one.plan, "state": one.state}
            row["call"] += f"\nat {one.site}" if one.site else ""
            row["wait"] = _age(one, now_us)
            # A group's name, or a file's, is no markup.
            table.add_row(*(Text(row.get(name, "")) for name in names))
            row = {}
    return table


def _show(statuses: list[RankStatus], last: int, now_us: int, console: Console) -> None:
    table, left_out = fit(partial(_table, statuses, last, now_us), _SPARE, console)
    console.print(table)
    if left_out:
        console.print(left_out)


def to_metrics(statuses: list[RankStatus], now_us: int) -> str:
    """Return the ranks' state in Prometheus's text format."""
    lines = []
    for name, kind, text, values in _METRICS:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for status in statuses:
            group = status.group.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            labels = f'group="{group}",rank="{status.rank}",pid="{status.pid}"'
            for verb, value in values(status, now_us).items():
                of_verb = f',verb="{verb}"' if verb else ""
                lines.append(f"{name}{{{labels}{of_verb}}} {float(value):.17g}")
    return "\n".join([*lines, ""])


def _longest_wait_s(status: RankStatus, now_us: int) -> dict[str, float]:
    began = [one.wait_began_us for one in status.operations if one.state == "waiting"]
    return {"": max(((now_us - since_us) / 1e6 for since_us in began), default=0.0)}


# Name, type, help, and the values by verb ("": of all). Sends and receives have no counts.
_METRICS: tuple[tuple[str, str, str, Callable[[RankStatus, int], Mapping[str, float]]], ...] = (
    (
        "fastcoll_calls_total",
        "counter",
        "Calls that the rank has begun, by verb.",
        lambda one, _: {verb: count.calls for verb, count in one.stats.items()},
    ),
    (
        "fastcoll_message_bytes_total",
        "counter",
        "Bytes of the messages of these calls.",
        lambda one, _: {verb: count.num_bytes for verb, count in one.stats.items()},
    ),
    (
        "fastcoll_waited_seconds_total",
        "counter",
        "Seconds in waits for other ranks that outlast the spinning.",
        lambda one, _: {verb: count.waited_s or 0.0 for verb, count in one.stats.items()},
    ),
    (
        "fastcoll_waiting_seconds",
        "gauge",
        "How long the rank has waited by now in a call of over a millisecond.",
        _longest_wait_s,
    ),
    ("fastcoll_broken", "gauge", "Whether the group is over.", lambda one, _: {"": one.is_broken}),
    (
        "fastcoll_stopped",
        "gauge",
        "Whether the process is stopped.",
        lambda one, _: {"": one.is_stopped},
    ),
)


def inspect(
    pid: Annotated[
        list[int] | None, typer.Option(help="Only this process; may be given again.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="Calls of each rank to show.")] = 4,
    json_path: JsonFile = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Print Prometheus's text format, for a collector.")
    ] = False,
    watch: Annotated[
        float | None, typer.Option(min=0.1, help="Look again every so many seconds, until Ctrl-C.")
    ] = None,
    wide: Wide = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            callback=writable, help="Write the times to this file for Chrome or Perfetto."
        ),
    ] = None,
) -> None:
    """Show the last calls of ranks, from outside: live, stuck or stopped, of the same user."""
    if watch is not None:
        _watch(pid or [], last, watch, wide)
        return
    statuses = _collect(pid or [])
    now_us = time.monotonic_ns() // 1000
    if trace is not None:
        trace.write_text(json.dumps(to_trace(statuses, now_us)))
    if metrics:
        typer.echo(to_metrics(statuses, now_us), nl=False)
    elif statuses and json_path != STDOUT:
        _show(statuses, last, now_us, make_console(wide))
    write_json({"now_us": now_us, "ranks": [status.to_dict() for status in statuses]}, json_path)
    if not statuses and not metrics:
        end_with(ExitCode.FAILED, "no rank of a group was found")


def _watch(pids: list[int], last: int, pause_s: float, wide: bool) -> None:
    """Show the ranks again and again, in place on a terminal."""
    console = make_console(wide)
    if not console.is_terminal:  # one after the other, in a log
        while True:
            _show(_collect(pids), last, time.monotonic_ns() // 1000, console)
            time.sleep(pause_s)
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            now_us = time.monotonic_ns() // 1000
            make = partial(_table, _collect(pids), last, now_us)
            table, _ = fit(make, _SPARE, console)
            live.update(table, refresh=True)
            time.sleep(pause_s)
