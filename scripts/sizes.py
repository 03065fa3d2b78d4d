#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the lines of each room beside their target, then the long files and functions.

`scripts/sizes.toml` holds the targets, the limits, and the files and functions that exceed a limit
today. The house tests let that list shrink and never grow.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("python", "csrc", "kernels", "tests", "bench", "docs", "examples", "scripts")
SUFFIXES = (".py", ".pyi", ".h", ".inc", ".c", ".cpp", ".cu", ".cuh", ".pml", ".sh")
PARENTS = ("python/fastcoll", "csrc", "kernels", "tests")  # their folders have a row each


def read_table() -> dict:
    return tomllib.loads((ROOT / "scripts/sizes.toml").read_text())


def files_below(root: Path) -> dict[str, str]:
    """Return the text of every source file, by its path from the root."""
    paths = (path for folder in FOLDERS for path in root.glob(f"{folder}/**/*"))
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(paths)
        if path.suffix in SUFFIXES and path.is_file()
    }


def count_lines(texts: dict[str, str]) -> dict[str, int]:
    return {path: len(text.splitlines()) for path, text in texts.items()}


def functions_of(text: str) -> Iterator[tuple[str, int]]:
    """The functions of a Python file, nested ones too, with their lines without decorators."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def long_files(texts: dict[str, str], limit: int) -> dict[str, int]:
    """Files above the limit, but for those that a script writes: their second line says so."""
    return {
        path: lines
        for path, lines in count_lines(texts).items()
        if lines > limit and "Written by scripts/" not in texts[path].splitlines()[1]
    }


def long_functions(texts: dict[str, str], limit: int) -> dict[str, int]:
    """Python functions above the limit, as path:name; the longest of those with one name."""
    return {
        f"{path}:{name}": lines
        for path, text in texts.items()
        if path.endswith(".py")
        for name, lines in sorted(functions_of(text), key=lambda item: item[1])
        if lines > limit
    }


def lines_per_room(texts: dict[str, str]) -> dict[str, int]:
    """The lines of each folder, and of each folder below one of PARENTS."""
    rooms: dict[str, int] = {}
    for path, lines in count_lines(texts).items():
        parts = path.split("/")
        folders = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        for folder in folders:
            above = folder.rpartition("/")[0]
            if above in ("", "python", *PARENTS):
                rooms[folder] = rooms.get(folder, 0) + lines
    return dict(sorted(rooms.items()))


def main() -> None:
    table, texts = read_table(), files_below(ROOT)
    print(f"{'folder':32} {'lines':>7} {'target':>7}")
    for room, lines in lines_per_room(texts).items():
        target = table["target"].get(room)
        over = f"  {lines - target:+d}" if target and lines > target else ""
        print(f"{room:32} {lines:7d} {target or '':>7}{over}")
    limits = table["limit"]
    for kind, found in (
        ("file", long_files(texts, limits["file"])),
        ("function", long_functions(texts, limits["function"])),
    ):
        print(f"\n{kind}s over {limits[kind]} lines: {len(found)}")
        for name, lines in sorted(found.items(), key=lambda item: -item[1]):
            print(f"{lines:7d}  {name}")


if __name__ == "__main__":
    main()
