# SPDX-License-Identifier: Apache-2.0
"""ARCHITECTURE.md is short, names files that exist, and answers where a task's code is.

Each check has a control: a text or a list with a planted fault, in which it must find the fault.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.tree import source_files

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
ROOMS = (ROOT / "python/fastcoll/README.md").read_text()
MOST_LINES = 250
NUM_WORDS = 20

# The part that a reader wants to change, and its file: found by the page, or by a room.
TASKS = {
    "how a dead peer is noticed": "csrc/cpu/group_wait.h",
    "which rank an error names during init": "python/fastcoll/bootstrap/farewell.py",
    "the text of an error of a GPU kernel": "python/fastcoll/gpu/verdicts.py",
    "which algorithm a call gets": "python/fastcoll/choose/select.py",
    "what two_shot costs by the model": "python/fastcoll/choose/algorithms/two_shot.py",
    "how two_shot moves data on a CPU": "csrc/cpu/two_shot.h",
    "how two_shot moves data on a GPU": "kernels/cuda/two_shot.cuh",
    "how bfloat16 is rounded": "csrc/cpu/convert.h",
    "a word of shared memory": "kernels/layout.h",
    "the checks of a tensor's shape": "python/fastcoll/calls/tensors.py",
    "an environment variable": "python/fastcoll/env.py",
    "the docstring of all_reduce": "python/fastcoll/api/reductions.py",
    "which calls run without Python": "csrc/python/fast_calls.cpp",
    "in which thread an asynchronous call runs": "csrc/group/call_queue.h",
    "the header that starts a call between nodes": "python/fastcoll/nodes/packets.py",
    "how MPI carries bytes between nodes": "python/fastcoll/nodes/carriers/mpi.py",
    "who goes on after a loss": "python/fastcoll/bootstrap/agreement.py",
    "where a symmetric tensor lies": "python/fastcoll/memory/heap.py",
    "a command of the command line": "python/fastcoll/cli/doctor.py",
    "how torch.compile traces a verb": "python/fastcoll/integrations/traced.py",
}

_PATH = re.compile(r"`((?:python|csrc|kernels|tests|bench|scripts)/[\w./*-]*|\w+\.(?:py|md|toml))`")
_ADDED = re.compile(r"^\*\*An? ([\w ]+)\*\*, like `(\w+)`[^:]*:\n((?:\S.*\n)+)", re.MULTILINE)
_KINDS = ["verb", "algorithm", "dtype", "operation", "carrier", "device"]
# The most files that are written by hand for CPUs, and how the library names an example.
MOST_BY_HAND = {"verb": 6, "algorithm": 5, "dtype": 7}
NAMED = {
    "verb": r"\b{}\b",
    "algorithm": r'Algorithm(::|\.){0}\b|"{0}"',
    "dtype": r'DType(::|\.){0}\b|"{0}"|torch\.{0}\b|_row<std::{0}_t>',
}
_SOURCES = ("csrc", "kernels", "python/fastcoll", "scripts", "tests/support")


def named_paths(text: str) -> list[str]:
    """Return the files and folders of the repository that a page names."""
    return _PATH.findall(text)


def missing(paths: Sequence[str]) -> list[str]:
    """Return those that do not exist."""
    return [path for path in paths if not list(ROOT.glob(path))]


def leads_to(answer: str, page: str, rooms: str) -> bool:
    """Return whether a page names a file or its folder, or the rooms' README has its heading."""
    folder = answer.rsplit("/", 1)[0]
    if {answer, folder, folder + "/"} & set(named_paths(page)):
        return True
    room = re.fullmatch(r"python/fastcoll/(\w+)(?:/\w+)*", folder)
    return room is not None and f"## {room[1]}\n" in rooms


def unanswered(tasks: Mapping[str, str], page: str, rooms: str) -> list[str]:
    """Return the tasks whose answer is no file, or is named neither itself nor by its folder."""
    return [
        task
        for task, answer in tasks.items()
        if not (ROOT / answer).is_file() or not leads_to(answer, page, rooms)
    ]


def lists_of_places(page: str) -> dict[str, tuple[str, str]]:
    """Return by kind of addition the example, and the text that names its files."""
    return {kind: (like, text) for kind, like, text in _ADDED.findall(page)}


def by_hand(text: str) -> list[str]:
    """Return the files of a list that are written by hand, for CPUs."""
    return named_paths(text.split(";")[0])


def places_of(kind: str, example: str, roots: Sequence[str] = _SOURCES) -> list[str]:
    """Return the sources that name the example of a kind."""
    pattern = re.compile(NAMED[kind].format(example))
    inside = tuple(f"{root}/" for root in roots)
    paths = [path for path in source_files() if path.startswith(inside)]
    return [path for path in paths if pattern.search((ROOT / path).read_text())]


def places_without(example: str, paths: Sequence[str]) -> list[str]:
    """Return the files of a list that don't name the example, in upper or lower case."""
    wrong = []
    for path in paths:
        file = ROOT / path
        if not file.is_file() or example.lower() not in file.read_text().lower():
            wrong.append(path)
    return wrong


def glossary(page: str) -> list[str]:
    """Return the words of the glossary; a row may explain two that belong together."""
    [section] = re.findall(r"^## 2\..*?(?=^## 3\.)", page, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| (?!word |-)([^|]+) \|", section, re.MULTILINE)


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= MOST_LINES
    assert [line for line in PAGE.splitlines() if len(line) > 110] == []


def test_what_the_page_names_exists() -> None:
    paths = named_paths(PAGE)
    assert len(paths) > 80
    assert missing(paths) == []
    assert missing(["csrc/cpu/group.h", "csrc/cpu/grope.h"]) == ["csrc/cpu/grope.h"]


def test_the_glossary_has_its_twenty_words() -> None:
    words = glossary(PAGE)
    assert len(words) == len(set(words)) == NUM_WORDS


def test_each_task_is_answered_by_the_page_or_the_rooms() -> None:
    assert len(TASKS) == 20
    assert unanswered(TASKS, PAGE, ROOMS) == []


def test_an_unanswered_task_is_found() -> None:
    planted = {
        "a file that is gone": "csrc/cpu/grope.h",
        "a folder that nothing names": "docs/schedules.md",
        "a file that its page names": "csrc/cpu/group.h",
    }
    page = "The protocol is in `csrc/cpu/group.h`.\n"
    assert unanswered(planted, page, "") == list(planted)[:2]
    in_room = {"a check of arguments": "python/fastcoll/calls/tensors.py"}
    assert unanswered(in_room, page, "") == list(in_room)
    assert unanswered(in_room, page, "## calls\nOne call.\n") == []


def test_each_list_of_places_holds_the_example() -> None:
    found = lists_of_places(PAGE)
    assert list(found) == _KINDS
    for example, text in found.values():
        paths = named_paths(text)
        assert len(paths) >= 5
        assert places_without(example, paths) == [], example


@pytest.mark.parametrize("kind", NAMED)
def test_each_list_of_places_is_whole_and_short(kind: str) -> None:
    example, text = lists_of_places(PAGE)[kind]
    assert set(places_of(kind, example)) <= set(named_paths(text))
    assert 3 <= len(by_hand(text)) <= MOST_BY_HAND[kind]


def test_a_place_that_a_list_leaves_out_is_found() -> None:
    assert "csrc/cpu/run.h" in places_of("algorithm", "chain")
    assert "kernels/cuda/kernels.cuh" in places_of("algorithm", "two_shot")
    assert "csrc/cpu/reduce_kernels.inc" in places_of("dtype", "uint32")
    assert "python/fastcoll/api/moves.py" in places_of("verb", "scatter")
    assert places_of("verb", "no_such_verb") == []


def test_a_place_without_the_example_is_found() -> None:
    page = "**A dtype**, like `uint16` (wide):\n`csrc/dtypes.h`, `csrc/plan.h`,\n`csrc/no.h`.\n"
    [(example, text)] = lists_of_places(page).values()
    assert places_without(example, named_paths(text)) == ["csrc/plan.h", "csrc/no.h"]
    assert by_hand("`csrc/plan.h`, `csrc/no.h`; then\n`csrc/dtypes.h`.\n") == named_paths(text)[1:]
