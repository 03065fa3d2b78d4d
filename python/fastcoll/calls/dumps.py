# SPDX-License-Identifier: Apache-2.0
"""A file of a rank's last calls, written when its group breaks (FASTCOLL_DUMP_DIR).

Decides the files' names, and that no file, folder or reader of stderr holds up the error. Must not
know how calls are recorded.
"""

import contextlib
import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

from fastcoll import env
from fastcoll.bootstrap import blocking_calls
from fastcoll.calls.recorder import RankStatus, read_process
from fastcoll.text import say

# A folder on a network may never answer. The file may be late, the error may not.
_LIMIT_S = 1.0
_MOST_NAMES = 100  # of one rank of one group, from processes of the same number
_LONGEST_PART = 64  # of a name's characters; a file's name may have 255 bytes
_EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_dumped: set[tuple[str, str]] = set()  # file names and reasons: a verdict is raised again and again


def dump(reason: str) -> None:
    """Write this process's last calls to FASTCOLL_DUMP_DIR; C++ calls this with every error.

    One file for each group that is broken and that the reason names. The process's own files are
    new ones: no other file is read, followed or overwritten. If a file can't be written, stderr
    has a line; the error itself counts more, so this raises no `Exception`.
    """
    folder = env.DUMP_DIR.get()
    if not folder:
        return
    try:
        statuses = read_process(os.getpid())
        rows = [status.to_dict() for status in statuses]
        for status in _broken(statuses, reason):
            stem = _stem(status)
            if (stem, reason) in _dumped:
                continue
            _dumped.add((stem, reason))
            report = {
                "reason": reason,
                "host": platform.node(),
                "group": status.group,
                "rank": status.rank,
                "now_us": time.monotonic_ns() // 1000,
                "ranks": rows,
            }
            _write_in_time(Path(folder), stem, report)
    except Exception as error:
        say(f"{env.DUMP_DIR.name}: {error}")


def _broken(statuses: list[RankStatus], reason: str) -> list[RankStatus]:
    """Return the broken groups that the reason is about; all of them if it names none."""
    broken = [status for status in statuses if status.is_broken]
    return [status for status in broken if f'group "{status.group}"' in reason] or broken


def _stem(status: RankStatus) -> str:
    host, group = (
        re.sub(r"[^A-Za-z0-9._-]", "_", part)[:_LONGEST_PART]
        for part in (platform.node(), status.group)
    )
    return f"fastcoll-{host}-{os.getpid()}-{group}-rank{status.rank}"


def _write_in_time(folder: Path, stem: str, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=1).encode()
    try:
        blocking_calls.ask(lambda: _write(folder, stem, text), _LIMIT_S)
    except TimeoutError:
        raise TimeoutError(f"{folder} does not answer: its file may come later") from None


def _write(folder: Path, stem: str, text: bytes) -> None:
    """Write a new file: whole or not at all under the name that ends in .json."""
    unfinished, fd = _create(folder, stem, ".part")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text)
        _publish(unfinished, folder, stem)
    finally:
        with contextlib.suppress(FileNotFoundError):  # renamed
            unfinished.unlink()


def _create(folder: Path, stem: str, ending: str) -> tuple[Path, int]:
    for path in _names(folder, stem, ending):
        with contextlib.suppress(FileExistsError):
            return path, os.open(path, _EXCLUSIVE, 0o600)
    raise FileExistsError(f"{folder} has {_MOST_NAMES} files {stem}*{ending}")


def _publish(unfinished: Path, folder: Path, stem: str) -> None:
    for path in _names(folder, stem, ".json"):
        try:
            path.hardlink_to(unfinished)
        except FileExistsError:
            continue
        except OSError:  # a file system without links
            if os.path.lexists(path):
                continue
            unfinished.rename(path)
        return
    raise FileExistsError(f"{folder} has {_MOST_NAMES} files {stem}*.json")


def _names(folder: Path, stem: str, ending: str) -> list[Path]:
    numbers = ["", *(f"-{number}" for number in range(2, _MOST_NAMES + 1))]
    return [folder / f"{stem}{number}{ending}" for number in numbers]
