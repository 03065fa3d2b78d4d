# SPDX-License-Identifier: Apache-2.0
"""`fastcoll inspect`: the last calls of the ranks of this machine, read from outside.

Decides how it is shown; the ranks need not answer and may be stuck or stopped.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from fastcoll.calls.recorder import Operation, RankStatus, find_pids, read_process, to_trace
from fastcoll.cli.console import complain, make_console, writable
from fastcoll.errors import DriverError


def _collect(pids: list[int]) -> list[RankStatus]:
    """Read some processes, or all there are; unreadable ones are named and left out."""
    found = []
    for pid in pids or find_pids():
        try:
            statuses = read_process(pid)
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


def _show(statuses: list[RankStatus], last: int, now_us: int) -> None:
    table = Table(title="fastcoll inspect", title_justify="left")
    for name in ("group", "rank", "process", "#", "call", "plan", "state", "wait"):
        table.add_column(name, overflow="fold")
    for status in statuses:
        table.add_section()
        process = f"{status.pid}{', stopped' * status.is_stopped}"
        group = f"{status.group}{', broken' * status.is_broken}"
        who = (group, f"{status.rank} of {status.world_size}", process)
        if not status.operations:
            table.add_row(*map(Text, who), "", "never called anything")
        for one in status.operations[-last:]:
            age = _age(one, now_us)
            what = f"{one.what}\nat {one.site}" if one.site else one.what
            row = (*who, str(one.call), what, one.plan, one.state, age)
            table.add_row(*map(Text, row))  # a group's name, or a file's, is no markup
            who = ("", "", "")
    make_console().print(table)


def inspect(
    pid: Annotated[
        list[int] | None, typer.Option(help="Only this process; may be given again.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="Calls of each rank to show.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print all calls as JSON.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            callback=writable, help="Write the times to this file for Chrome or Perfetto."
        ),
    ] = None,
) -> None:
    """Show the last calls of ranks, from outside: live, stuck or stopped, of the same user."""
    statuses = _collect(pid or [])
    now_us = time.monotonic_ns() // 1000
    if trace is not None:
        trace.write_text(json.dumps(to_trace(statuses, now_us)))
    if as_json:
        rows = [status.to_dict() for status in statuses]
        typer.echo(json.dumps({"now_us": now_us, "ranks": rows}, indent=1))
    elif statuses:
        _show(statuses, last, now_us)
    if not statuses:
        complain("no rank of a group was found")
        raise typer.Exit(1)
