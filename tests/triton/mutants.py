# SPDX-License-Identifier: Apache-2.0
"""Copies of the package with planted bugs.

Decides how a bug is planted: as a replacement in the source's text, which must be found there. The
copy is a package of its own name, so that it lives beside the right one in one process.
"""

import importlib
import itertools
import shutil
import sys
from pathlib import Path
from types import ModuleType

import fastcoll_kernels

_SOURCE = Path(fastcoll_kernels.__file__).parent

# (file, text to be replaced, what it becomes), ...
Bug = tuple[tuple[str, str, str], ...]


def plant(folder: Path, name: str, *bugs: Bug) -> str:
    """Write a copy with bugs; returns its name, for `load` with the same folder."""
    package = f"planted_{name}"
    shutil.copytree(_SOURCE, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in itertools.chain(*bugs):
        path = folder / package / file
        text = path.read_text()
        assert old in text, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new))
    return package


def load(folder: str, package: str, module: str) -> ModuleType:
    """A module of a copy, or of the package itself."""
    if package != "fastcoll_kernels" and folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(f"{package}.{module}")
