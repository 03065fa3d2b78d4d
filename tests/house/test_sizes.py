# SPDX-License-Identifier: Apache-2.0
"""No file and no function grows beyond the limits of scripts/sizes.toml."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sizes", ROOT / "scripts/sizes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sizes = load_script()
TABLE = sizes.read_table()


def complaints(found: dict[str, int], listed: dict[str, int]) -> list[str]:
    """Return the faults of a list of exceptions: new ones, ones that grew, needless ones."""
    grown = [
        f"{name} has {lines} lines, {listed[name]} allowed"
        for name, lines in found.items()
        if name in listed and lines > listed[name]
    ]
    new = [f"{name} is too long: {found[name]} lines" for name in found.keys() - listed.keys()]
    needless = [f"{name} is short enough: unlist it" for name in listed.keys() - found.keys()]
    return sorted(grown + new + needless)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["file", "function"])
def test_only_the_listed_ones_are_long(kind: str) -> None:
    texts = sizes.files_below(ROOT)
    assert len(texts) > 300
    find = {"file": sizes.long_files, "function": sizes.long_functions}[kind]
    assert complaints(find(texts, TABLE["limit"][kind]), TABLE[kind]) == []


def test_every_target_has_its_folder() -> None:
    assert TABLE["target"].keys() <= sizes.lines_per_room(sizes.files_below(ROOT)).keys()


def test_a_long_file_and_a_long_function_are_found(tmp_path: Path) -> None:
    room = tmp_path / "python/fastcoll/room"
    room.mkdir(parents=True)
    (room / "long.py").write_text("class A:\n    def f(self):\n" + "        f()\n" * 400)
    (room / "written.pyi").write_text(
        "# Licence\n# Written by scripts/verbs.py.\n" + "a: int\n" * 400
    )
    (room / "short.py").write_text("def f():\n    f()\n" * 200)
    texts = sizes.files_below(tmp_path)
    path = "python/fastcoll/room/long.py"
    assert sizes.long_files(texts, 400) == {path: 402}
    assert sizes.long_functions(texts, 60) == {f"{path}:f": 401}
    assert sizes.lines_per_room(texts) == {
        "python": 1204,
        "python/fastcoll": 1204,
        "python/fastcoll/room": 1204,
    }


def test_a_list_of_exceptions_only_shrinks() -> None:
    assert complaints({"a": 500, "b": 401}, {"a": 500, "b": 402}) == []
    assert complaints({"a": 501, "b": 401}, {"a": 500, "c": 450}) == [
        "a has 501 lines, 500 allowed",
        "b is too long: 401 lines",
        "c is short enough: unlist it",
    ]
