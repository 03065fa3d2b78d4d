# SPDX-License-Identifier: Apache-2.0
"""The flight recorder as seen from outside: the last calls of the ranks of running groups.

Every rank keeps its last 64 calls in its own shared memory. Other processes of its user can read it
through /proc, also while the rank is stuck or stopped. Decides how the ranks are found and how
their calls become a trace. Must not know how it is shown.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fastcoll.bootstrap.mesh import is_stopped
from fastcoll.errors import DriverError
from fastcoll.native import _C

_REGION = "/memfd:fastcoll-region"


@dataclass(frozen=True)
class Operation:
    """One call of a rank."""

    call: int
    verb: str
    what: str  # the call as error messages show it
    plan: str
    message_bytes: int
    is_complete: bool  # this rank needs nothing more of it
    wait_began_us: int  # when it began to wait, by CLOCK_MONOTONIC; 0 if it never waited over 1 ms
    wait_ended_us: int  # 0 while it waits, and if it never did
    began_us: int  # when it began, if its group traces (FASTCOLL_DEBUG=trace); else 0
    ended_us: int  # when it was over; 0 before, and if it failed
    site: str  # where the program made it, if its group traces

    @property
    def state(self) -> str:
        """Return "complete", "waiting" (for over 1 ms, now) or "inside"."""
        if self.is_complete:
            return "complete"
        return "waiting" if self.wait_began_us and not self.wait_ended_us else "inside"


class VerbStats(NamedTuple):
    """A rank's calls of one verb, since its group began.

    Attributes:
        calls: Calls begun.
        num_bytes: Bytes of their messages; where each rank has a part, of one part.
        waited_s: Seconds in waits for other ranks. A wait that ends while the rank still spins,
            within some 50 us, is not counted. None over several nodes, where carriers wait.
    """

    calls: int
    num_bytes: int
    waited_s: float | None


def stats_of(counts: Mapping[str, tuple[int, int, int]]) -> dict[str, VerbStats]:
    return {
        verb: VerbStats(calls, num_bytes, waited_us / 1e6)
        for verb, (calls, num_bytes, waited_us) in counts.items()
    }


@dataclass(frozen=True)
class RankStatus:
    """One rank of one group; `operations` are its last ones, oldest first."""

    pid: int
    group: str
    rank: int
    world_size: int
    is_broken: bool
    is_stopped: bool
    stats: dict[str, VerbStats]
    operations: list[Operation]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON can carry it."""
        rows = [{**asdict(one), "state": one.state} for one in self.operations]
        stats = {verb: one._asdict() for verb, one in self.stats.items()}
        return {**asdict(self), "stats": stats, "operations": rows}


def find_pids() -> list[int]:
    """Return the processes that are ranks of a group and may be looked at, this one not."""
    pids = sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # another user's, or gone
            if pid != os.getpid() and _region_links(pid):
                found.append(pid)
    return found


def read_process(pid: int) -> list[RankStatus]:
    """Return a process's rank and state in each of its groups.

    Raises:
        OSError: There is no such process, or it is another user's.
        DriverError: It runs another version of fastcoll.
    """
    found = []
    for link in _region_links(pid):
        with contextlib.suppress(FileNotFoundError):  # the group was closed meanwhile
            found.append(_read_region(pid, link))
    return sorted(found, key=lambda status: status.group)


def _region_links(pid: int) -> list[Path]:
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if str(link.readlink()).startswith(_REGION):
                links.append(link)
    return links


def _read_region(pid: int, link: Path) -> RankStatus:
    # Another user's process may have a FIFO of that name.
    fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = _C.read_status(fd)
    except DriverError as error:
        raise DriverError(f"process {pid}: {error}") from error
    finally:
        os.close(fd)
    operations = [Operation(**row) for row in status.pop("operations")]
    stats = stats_of(status.pop("counts"))
    stopped = is_stopped(pid)
    return RankStatus(pid=pid, is_stopped=stopped, stats=stats, operations=operations, **status)


def to_trace(statuses: list[RankStatus], now_us: int) -> dict[str, Any]:
    """Return calls as a trace that Chrome and Perfetto show: one row for each rank.

    Of a group that traces it has every call, with its wait inside if that took over a millisecond.
    Otherwise only such waits have times, and nothing else is in it.
    """
    events: list[dict[str, Any]] = []
    for status in statuses:
        name = f"{status.group}, rank {status.rank}"
        place = {"pid": status.pid, "tid": status.rank}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": name}, **place})
        for one in status.operations:
            details = {"call": one.call, "plan": one.plan, "state": one.state, "site": one.site}
            spans = [(one.what, one.began_us, one.ended_us)] if one.began_us else []
            if one.wait_began_us:
                what = "wait" if spans else one.what
                spans.append((what, one.wait_began_us, one.wait_ended_us))
            for what, began_us, ended_us in spans:
                times = {"ts": began_us, "dur": max(0, (ended_us or now_us) - began_us)}
                events.append({"ph": "X", "name": what, "args": details, **times, **place})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
