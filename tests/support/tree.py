# SPDX-License-Identifier: Apache-2.0
"""The files of the checkout, or of an unpacked source archive. Leaves out what a build made."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def source_files(root: Path = ROOT) -> list[str]:
    """Return the names of all files that git tracks or would add, or that the archive lists."""
    listing = root / "fastcoll.egg-info/SOURCES.txt"
    if not (root / ".git").exists() and listing.is_file():
        names = listing.read_text(encoding="utf-8").splitlines()
        return [name for name in names if not name.startswith("fastcoll.egg-info/")]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (root / name).is_file()]
