# SPDX-License-Identifier: Apache-2.0
"""Whether a file can be believed: code that is loaded, tables that decide.

Decides which users may have written one: this user or root. Must not know the file's contents.
"""

import errno
import os
import stat
from pathlib import Path

from fastcoll.errors import UsageError

_MOST_LINKS = 40  # as many as the kernel follows


def require_trusted(path: Path) -> Path:
    """Return the real path of a file that only this user and root can have written or replaced.

    Every folder and symbolic link on the way is held against the rule, from the root downwards.
    No other user can change a checked part, so the path stays good until it is opened.

    Raises:
        UsageError: Another user owns a part of the path, or may write to it.
        OSError: There is no such file, or it can't be looked at.
    """
    here, num_links = Path("/"), 0
    left = list(reversed(path.absolute().parts[1:]))
    _require_ours(here, here.lstat(), path)
    while left:
        name = left.pop()
        if name == "..":
            here = here.parent
            continue
        status = (here / name).lstat()
        _require_ours(here / name, status, path)
        if not stat.S_ISLNK(status.st_mode):
            here /= name
            continue
        num_links += 1
        if num_links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = (here / name).readlink()
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        here = Path("/") if target.is_absolute() else here
    return here


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone.

    Raises:
        OSError: The system refused one.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def _require_ours(part: Path, status: os.stat_result, path: Path) -> None:
    """Check the owner and the mode of one part of a path."""
    is_folder, is_link = stat.S_ISDIR(status.st_mode), stat.S_ISLNK(status.st_mode)
    if status.st_uid not in _owners(is_folder=is_folder):
        raise UsageError(
            f"{path} is not used: user {status.st_uid} owns {part}, and could have put anything "
            f"there. Use a path that only user {os.geteuid()} and root own"
        )
    # In a sticky folder, as /tmp is, users rename or remove only their own files.
    is_sticky = is_folder and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky and not is_link:
        raise UsageError(
            f"{path} is not used: other users may write to {part}. `chmod go-w {part}` forbids it; "
            "make sure first that nobody did"
        )


def _owners(*, is_folder: bool) -> set[int]:
    """Return the users whose files are believed.

    A user namespace may have no root, as in many rootless containers. Then the machine's root shows
    as the user that stands for all users without a number there. Its folders are on every path.
    """
    owners = {0, os.geteuid()}
    if is_folder and not _has_root():
        owners.add(int(_read("/proc/sys/kernel/overflowuid") or 65534))
    return owners


def _has_root() -> bool:
    """Return whether user 0 exists in this process's user namespace."""
    rows = [line.split() for line in _read("/proc/self/uid_map").splitlines()]
    return not rows or any(row[0] == "0" for row in rows)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
